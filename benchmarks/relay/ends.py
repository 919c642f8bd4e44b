"""Both ends of a relay in one process: a scripted scheduler, and the clients that read.

The scheduler sends a step when the clients have received the previous one, or one several steps ago, so the
gateway is never far behind.
"""

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any

import grpc
import grpc.aio

from benchmarks.streams.client import short_request
from protos.common.v1 import common_pb2
from protos.engine.v1 import engine_pb2, engine_pb2_grpc
from protos.inference.v1 import inference_pb2_grpc
from quire_tools.simulated_worker import bundle
from quire_tools.simulated_worker.settings import SimulatedWorkerSettings
from svc_common import wire_arrays
from svc_common.net import rpc

LETTERS = range(ord("a"), ord("z") + 1)
"""Token ids of the simulated model's tokenizer: one per byte."""
TIMEOUT_S = 600.0


@dataclass(frozen=True, slots=True)
class Feed:
    """`steps` messages with `run` tokens for each of `streams`; `ahead` of them may be in flight.

    `warm_up` steps do not count.
    """

    name: str
    streams: int
    steps: int
    run: int = 1
    ahead: int = 1

    @property
    def warm_up(self) -> int:
        """Number of steps before those that count."""
        return max(1, self.steps // 10)

    @property
    def tokens(self) -> int:
        """Tokens of each stream."""
        return self.steps * self.run


@dataclass(slots=True)
class Progress:
    """What the clients have received so far. `num_bytes`: of their messages."""

    num_tokens: int = 0
    num_events: int = 0
    num_bytes: int = 0
    _goal: int = 0
    _reached: asyncio.Event = field(default_factory=asyncio.Event)

    def add(self, num_tokens: int, num_bytes: int) -> None:
        """Count one message."""
        self.num_tokens += num_tokens
        self.num_events += 1
        self.num_bytes += num_bytes
        if self.num_tokens >= self._goal:
            self._reached.set()

    async def until(self, num_tokens: int) -> None:
        """Wait until the clients together have `num_tokens`."""
        self._goal = num_tokens
        if self.num_tokens < num_tokens:
            self._reached.clear()
            await self._reached.wait()


class ScriptedScheduler(engine_pb2_grpc.EngineServiceServicer):
    """EngineService for one gateway. `on_counted` is called when counting starts and after the last token arrived."""

    def __init__(self, feed: Feed, progress: Progress, on_counted: Callable[[], None]) -> None:
        self._feed = feed
        self._progress = progress
        self._on_counted = on_counted
        self._handles: list[int] = []
        self._all_here = asyncio.Event()
        self._bundle, self._limits = bundle.build(SimulatedWorkerSettings())

    async def GetModelBundle(self, request: Any, context: Any) -> AsyncIterator[engine_pb2.GetModelBundleResponse]:
        """The bundle of the simulated model."""
        yield engine_pb2.GetModelBundleResponse(chunk=self._bundle)

    async def Attach(self, request_iterator: Any, context: Any) -> AsyncIterator[engine_pb2.EngineMessage]:
        """Accept all requests, then send the steps."""
        reading = asyncio.create_task(self._read(request_iterator))
        try:
            state = engine_pb2.ServiceState(serving=True)
            identity = rpc.Identity().message()
            yield engine_pb2.EngineMessage(
                welcome=engine_pb2.Welcome(identity=identity, limits=self._limits, state=state)
            )
            await self._all_here.wait()
            async for message in self._steps():
                yield message
            await reading
        finally:
            reading.cancel()

    async def _read(self, messages: Any) -> None:
        async for message in messages:
            self._handles += [submit.handle for submit in message.submits]
            if len(self._handles) == self._feed.streams:
                self._all_here.set()

    async def _steps(self) -> AsyncIterator[engine_pb2.EngineMessage]:
        feed, per_step = self._feed, self._feed.streams * self._feed.run
        yield engine_pb2.EngineMessage(started=[engine_pb2.Started(handle=handle) for handle in self._handles])
        for step in range(feed.steps):
            await self._progress.until((step + 1 - feed.ahead) * per_step)
            if step == feed.warm_up:
                self._on_counted()
            yield engine_pb2.EngineMessage(tokens=self._columns(step))
        await self._progress.until(feed.steps * per_step)
        self._on_counted()
        yield engine_pb2.EngineMessage(finished=[self._finished(handle) for handle in self._handles])

    def _columns(self, step: int) -> engine_pb2.TokenColumns:
        feed = self._feed
        ids = [LETTERS[(step * feed.run + i) % len(LETTERS)] for i in range(feed.run)]
        return engine_pb2.TokenColumns(
            handles=wire_arrays.pack(self._handles, wire_arrays.U32),
            choices=wire_arrays.pack([0] * feed.streams, wire_arrays.U32),
            token_offsets=wire_arrays.pack([step * feed.run] * feed.streams, wire_arrays.U32),
            counts=wire_arrays.pack([feed.run] * feed.streams, wire_arrays.U32),
            token_ids=wire_arrays.pack(ids * feed.streams),
        )

    def _finished(self, handle: int) -> engine_pb2.Finished:
        account = engine_pb2.RequestAccount(prompt_tokens=2)
        reason = common_pb2.FINISH_REASON_LENGTH
        return engine_pb2.Finished(
            handle=handle, reason=reason, num_output_tokens=self._feed.tokens, last=True, account=account
        )


class Clients:
    """Reads streams over several connections."""

    def __init__(self, address: str, num_connections: int) -> None:
        own = [("grpc.use_local_subchannel_pool", 1)]  # else channels to one address share a connection
        self._channels = [grpc.aio.insecure_channel(address, options=own) for _ in range(num_connections)]

    async def read_all(self, feed: Feed, progress: Progress) -> None:
        """Read all streams to their ends. Raises RuntimeError if tokens are missing."""
        try:
            await asyncio.gather(*(self._read(i, feed, progress) for i in range(feed.streams)))
        finally:
            await self.close()

    async def _read(self, number: int, feed: Feed, progress: Progress) -> None:
        stub = inference_pb2_grpc.InferenceServiceStub(self._channels[number % len(self._channels)])
        num_tokens = 0
        async for event in stub.GenerateStream(short_request(feed.tokens), timeout=TIMEOUT_S, wait_for_ready=True):
            if new := len(event.delta.token_ids):
                num_tokens += new
                progress.add(new, event.ByteSize())
        if num_tokens != feed.tokens:
            raise RuntimeError(f"a stream ended after {num_tokens} of {feed.tokens} tokens")

    async def read_bytes(self, method: str, num: int, progress: Progress) -> None:
        """Read `num` streams of `method`; each message counts as one token."""

        async def read(channel: grpc.aio.Channel) -> None:
            async for message in channel.unary_stream(method)(b"", timeout=TIMEOUT_S, wait_for_ready=True):
                progress.add(1, len(message))

        await asyncio.gather(*(read(self._channels[i % len(self._channels)]) for i in range(num)))

    async def send_bytes(self, method: str, messages: AsyncIterator[bytes]) -> None:
        """Send one stream until it ends."""
        await self._channels[0].stream_unary(method)(messages, timeout=TIMEOUT_S, wait_for_ready=True)

    async def close(self) -> None:
        """Close the connections."""
        await asyncio.gather(*(channel.close() for channel in self._channels))
