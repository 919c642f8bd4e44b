"""Open-loop client: sends requests at their times regardless of earlier ones, and records their results.

Used by the overload and tenants benchmarks, in one process with four connections.
"""

import asyncio
import random
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import grpc
import grpc.aio

from benchmarks.report import spread
from protos.inference.v1 import inference_pb2, inference_pb2_grpc
from svc_common.net import rpc

_LIMIT_S = 120.0


@dataclass(frozen=True, slots=True)
class Flow:
    """Calls of one tenant.

    `rate`: of a Poisson process, per second; 0 = `num_clients` clients that each send the next call when one
    ends. `key`: API key, empty = none. `prompt`, `output`: tokens.
    """

    name: str
    rate: float
    prompt: int = 32
    output: int = 16
    num_clients: int = 0
    key: str = ""


@dataclass(slots=True)
class Sent:
    """One call. Times in seconds since the run began; `first_s` None: no token.

    `end`: "ended", the status and reason that the gateway gave, or the status and message of the transport.
    """

    flow: str
    at_s: float
    first_s: float | None = None
    over_s: float = 0.0
    end: str = ""
    has_retry_time: bool = False

    @property
    def ttft_s(self) -> float:
        """Time to first token; there must be one."""
        assert self.first_s is not None
        return self.first_s - self.at_s


class OpenLoad:
    """The calls of one run."""

    def __init__(self, address: str, seed: int) -> None:
        own = [("grpc.use_local_subchannel_pool", 1)]
        self._channels = [grpc.aio.insecure_channel(address, options=own) for _ in range(4)]
        self._stubs = [inference_pb2_grpc.InferenceServiceStub(channel) for channel in self._channels]
        self._seed = seed
        self._tasks: set[asyncio.Task[None]] = set()
        self._began = 0.0
        self.sent: list[Sent] = []

    async def run(self, flows: Sequence[Flow], seconds: float) -> list[Sent]:
        """Make all calls of this time. Returns them after the last has ended."""
        self._began = time.perf_counter()
        sources = [self._poisson(flow, seconds) for flow in flows if flow.rate]
        sources += [self._closed(flow, seconds) for flow in flows for _ in range(flow.num_clients)]
        await asyncio.gather(*sources)
        await asyncio.gather(*self._tasks)
        for channel in self._channels:
            await channel.close()
        return self.sent

    @property
    def _now(self) -> float:
        return time.perf_counter() - self._began

    async def _poisson(self, flow: Flow, seconds: float) -> None:
        draw, due = random.Random(f"{self._seed} {flow.name}"), 0.0
        while (due := due + draw.expovariate(flow.rate)) < seconds:
            await asyncio.sleep(max(0.0, due - self._now))
            task = asyncio.create_task(self._call(flow))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _closed(self, flow: Flow, seconds: float) -> None:
        while self._now < seconds:
            await self._call(flow)

    async def _call(self, flow: Flow) -> None:
        sent = Sent(flow.name, self._now)
        self.sent.append(sent)
        metadata = (("authorization", f"Bearer {flow.key}"),) if flow.key else ()
        stub = self._stubs[len(self.sent) % len(self._stubs)]
        try:
            async for event in stub.GenerateStream(_request(flow, len(self.sent)), timeout=_LIMIT_S, metadata=metadata):
                if sent.first_s is None and event.HasField("delta"):
                    sent.first_s = self._now
            sent.end = "ended"
        except grpc.aio.AioRpcError as error:
            known = rpc.from_rpc_error(error)
            why = known.reason if rpc.is_from_peer(error) else f"{error.details()} ({error.debug_error_string()})"
            sent.end, sent.has_retry_time = f"{known.status} {why}", known.retry_after_s is not None
        sent.over_s = self._now


def _request(flow: Flow, number: int) -> inference_pb2.GenerateRequest:
    return inference_pb2.GenerateRequest(
        token_ids=inference_pb2.TokenIds(ids=[32 + (number * 7 + i * i) % 200 for i in range(flow.prompt)]),
        sampling=inference_pb2.SamplingParams(temperature=0.0),
        stop=inference_pb2.StopConditions(max_tokens=flow.output, ignore_eos=True),
    )


def figures(sent: Sequence[Sent], seconds: float) -> dict[str, Any]:
    """Figures of the calls that began after the first tenth of `seconds`: ends, first tokens, refusals."""
    counted = [call for call in sent if call.at_s >= 0.1 * seconds]
    served = [call for call in counted if call.end == "ended"]
    refused = [call for call in counted if call.end.startswith("RESOURCE_EXHAUSTED")]
    in_time = sum(0.1 * seconds <= call.over_s <= seconds for call in sent if call.end == "ended")
    return {
        "calls": len(counted),
        "ends": dict(Counter(call.end for call in counted)),
        "served_per_s": round(in_time / (0.9 * seconds), 2),
        "ttft_s": spread([call.ttft_s for call in served]),
        "refused_s": spread([call.over_s - call.at_s for call in refused]),
        "refused_with_retry_time": sum(call.has_retry_time for call in refused),
    }
