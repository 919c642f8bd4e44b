"""Targets of load: their interface, and Quire's gRPC API as one. A target streams one request and time-stamps its record.

Not here: OpenAI endpoints (quire_tools.bench.openai_target), which need httpx.
"""

from collections.abc import Callable
from types import TracebackType
from typing import Protocol

import grpc.aio

from protos.inference.v1 import inference_pb2, inference_pb2_grpc
from quire.client.connections import Credentials, asyncio_channel
from quire_tools.bench.measure import Record
from quire_tools.bench.workloads import PlannedRequest
from svc_common.net import rpc

Clock = Callable[[], float]
_NO_CREDENTIALS = Credentials()


class LoadTarget(Protocol):
    """An async context manager that can stream requests."""

    name: str

    async def __aenter__(self) -> "LoadTarget": ...

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None: ...

    async def stream(self, planned: PlannedRequest, record: Record, clock: Clock) -> None:
        """Send a request and fill `record` as tokens arrive; raises transport and server errors."""


class GrpcTarget:
    """`quire.inference.v1` at HOST:PORT. `num_channels` connections, used in turn."""

    def __init__(
        self,
        address: str,
        *,
        ignore_eos: bool,
        timeout_s: float,
        num_channels: int = 4,
        model: str = "",
        credentials: Credentials = _NO_CREDENTIALS,
    ) -> None:
        self.name = f"grpc://{address}"
        self._address = address
        self._model = model
        self._credentials = credentials
        self._ignore_eos = ignore_eos
        self._timeout_s = timeout_s
        self._num_channels = num_channels
        self._channels: list[grpc.aio.Channel] = []
        self._stubs: list[inference_pb2_grpc.InferenceServiceStub] = []

    async def __aenter__(self) -> "GrpcTarget":
        # Channels to one address share a connection unless each has its own subchannel pool.
        options = [("grpc.use_local_subchannel_pool", 1)]
        make = asyncio_channel(self._credentials, options)
        self._channels = [make(self._address) for _ in range(self._num_channels)]
        stub = inference_pb2_grpc.InferenceServiceStub
        self._stubs = [stub(channel) for channel in self._channels]  # type: ignore[no-untyped-call]
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        for channel in self._channels:
            await channel.close(None)

    def _request(self, planned: PlannedRequest) -> inference_pb2.GenerateRequest:
        request = inference_pb2.GenerateRequest(
            model=self._model,
            sampling=inference_pb2.SamplingParams(temperature=0.0),
            stop=inference_pb2.StopConditions(max_tokens=planned.max_tokens, ignore_eos=self._ignore_eos),
        )
        if planned.token_ids:
            request.token_ids.ids.extend(planned.token_ids)
        else:
            request.text = planned.text
        return request

    async def stream(self, planned: PlannedRequest, record: Record, clock: Clock) -> None:
        """Run one GenerateStream call."""
        stub = self._stubs[planned.index % len(self._stubs)]
        record.sent_s = clock()
        metadata = self._credentials.metadata()
        call = stub.GenerateStream(self._request(planned), timeout=self._timeout_s, metadata=metadata)
        async for event in call:
            kind = event.WhichOneof("event")
            if kind == "delta" and event.delta.token_ids:
                record.token_times_s.append(clock())
                record.output_tokens += len(event.delta.token_ids)
            elif kind == "usage":
                record.prompt_tokens = event.usage.prompt_tokens
                record.cached_tokens = event.usage.cached_prompt_tokens


def error_name(error: BaseException) -> str:
    """Short, stable text to count errors by."""
    if isinstance(error, grpc.RpcError):
        known = rpc.from_rpc_error(error)
        return f"{known.status} {known.reason}".strip()
    return f"{type(error).__name__}: {error}"[:200]
