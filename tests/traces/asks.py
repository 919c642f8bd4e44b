"""Requests of every kind that a trace must explain: plain, of several samples, long, cancelled, refused, too late."""

import asyncio
import random
from collections import Counter
from dataclasses import dataclass

import grpc
import grpc.aio

from gateway_svc.access.keys import hash_key
from protos.inference.v1 import inference_pb2 as pb
from protos.inference.v1 import inference_pb2_grpc
from svc_common.net import rpc

KINDS = ("plain", "two", "long", "plain", "cancelled", "invalid", "waits_too_long", "plain", "runs_too_long", "quota")
CLIENTS_OWN = "DEADLINE_EXCEEDED"
LEAVES_EARLY = ("cancelled", "waits_too_long", "runs_too_long")
KEYS = {name: f"qk_test_{name}_0123456789abcdefghijklmnopq" for name in ("many", "few")}
TENANTS = f"""
[tenants.many]
[[tenants.many.keys]]
sha256 = "{hash_key(KEYS["many"])}"
admin = true
[tenants.few]
tokens_per_min = 60
[[tenants.few.keys]]
sha256 = "{hash_key(KEYS["few"])}"
"""
_PROMPT_TOKENS = {"long": 150, "waits_too_long": 40}


@dataclass(slots=True)
class Ask:
    """One request, and how it ended for its client: reason of the error, "" = it was served, None = its client left.

    CLIENTS_OWN: the client's end of the connection did not wait for what the gateway had to say, or it never came there.
    """

    number: int
    kind: str
    tenant: str
    end: str | None = ""

    @property
    def request_id(self) -> str:
        """Public."""
        return f"ask-{self.number}"

    @property
    def core_id(self) -> str:
        """The scheduler's."""
        return f"{self.tenant}:{self.request_id}"

    @property
    def is_single(self) -> bool:
        """One sample."""
        return self.kind != "two"

    @property
    def leaves_early(self) -> bool:
        """It ended at the gateway before it did at the scheduler."""
        return self.kind in LEAVES_EARLY

    def message(self) -> pb.GenerateRequest:
        """What is sent."""
        draw = random.Random(self.number)
        count = _PROMPT_TOKENS.get(self.kind, draw.choice((3, 20, 40)))
        max_tokens = 150 if self.kind in LEAVES_EARLY else draw.choice((1, 4, 8, 16))
        request = pb.GenerateRequest(
            token_ids=pb.TokenIds(ids=[32 + draw.randrange(200) for _ in range(count)]),
            stop=pb.StopConditions(max_tokens=max_tokens, ignore_eos=True),
            sampling=pb.SamplingParams(temperature=1.0, seed=self.number, n=2 if self.kind == "two" else 1),
        )
        if self.kind == "invalid":
            request.sampling.top_p = 7
        return request


def asks(count: int) -> list[Ask]:
    """The kinds in turn."""
    kinds = [KINDS[i % len(KINDS)] for i in range(count)]
    return [Ask(i, kind, "few" if kind == "quota" else "many") for i, kind in enumerate(kinds)]


class Clients:
    """Owner of the connection and of how many are at it."""

    def __init__(self, address: str, num_at_once: int) -> None:
        self._channel = grpc.aio.insecure_channel(address)
        self._stub = inference_pb2_grpc.InferenceServiceStub(self._channel)  # type: ignore[no-untyped-call]
        self._room = asyncio.Semaphore(num_at_once)

    async def send(self, wanted: list[Ask]) -> Counter[str]:
        """All of them, the first behind the others: once it is served, their steps are in the log. How many ended how."""
        first, *others = wanted
        await asyncio.gather(*(self._send(ask) for ask in others))
        await self._send(first)
        await self._channel.close()
        return Counter("left" if ask.end is None else ask.end or "served" for ask in wanted)

    async def _send(self, ask: Ask) -> None:
        metadata = (("x-request-id", ask.request_id), ("authorization", f"Bearer {KEYS[ask.tenant]}"))
        timeout_s = {"waits_too_long": 0.1, "runs_too_long": 0.4}.get(ask.kind, 120)
        async with self._room:
            try:
                call = self._stub.GenerateStream(ask.message(), timeout=timeout_s, metadata=metadata)
                async for event in call:
                    if ask.kind == "cancelled" and event.HasField("delta"):
                        call.cancel()
                        ask.end = None
                        return
            except grpc.aio.AioRpcError as error:
                ask.end = rpc.from_rpc_error(error).reason
