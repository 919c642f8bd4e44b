"""A scheduler whose every word the test decides, behind a real gRPC server: for what the real one cannot be made to do.

Also here: a real gateway in this process around it. Everything runs on the test's own event loop.
"""

import asyncio
import contextlib
import functools
import hashlib
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import grpc.aio

from gateway_svc import app
from gateway_svc.settings import GatewaySettings
from protos.common.v1 import common_pb2
from protos.engine.v1 import engine_pb2, engine_pb2_grpc
from protos.inference.v1 import inference_pb2_grpc
from svc_common import wire_arrays
from svc_common.errors import Unavailable
from svc_common.net import rpc
from tests.support.services import models

TEST_TIMEOUT_S = 120.0
PATIENCE_S = 40.0


def asynchronous(test: Callable[..., Awaitable[None]]) -> Callable[..., None]:
    """Runs an asynchronous test on a loop of its own, bounded in time."""

    @functools.wraps(test)
    def run(*args: Any, **kwargs: Any) -> None:
        asyncio.run(asyncio.wait_for(test(*args, **kwargs), TEST_TIMEOUT_S))

    return run


def limits() -> common_pb2.ModelLimits:
    """The built-in model's limits, with the digest of its bundle."""
    made = common_pb2.ModelLimits()
    made.CopyFrom(models.tiny().limits)
    made.bundle_digest = hashlib.sha256(models.tiny_bundle()).hexdigest()
    return made


Tops = list[list[tuple[int, float]]]


def tokens(
    handle: int,
    offset: int,
    ids: list[int],
    logprobs: list[float] | None = None,
    *,
    choice: int = 0,
    tops: Tops | None = None,
) -> engine_pb2.EngineMessage:
    """One run of tokens; `tops`: for each its likeliest neighbours."""
    flat = [pair for top in tops or [] for pair in top]
    return engine_pb2.EngineMessage(
        tokens=engine_pb2.TokenColumns(
            handles=wire_arrays.pack([handle], wire_arrays.U32),
            choices=wire_arrays.pack([choice], wire_arrays.U32),
            token_offsets=wire_arrays.pack([offset], wire_arrays.U32),
            counts=wire_arrays.pack([len(ids)], wire_arrays.U32),
            token_ids=wire_arrays.pack(ids),
            logprobs=wire_arrays.pack(logprobs, wire_arrays.F32) if logprobs else b"",
            top_counts=wire_arrays.pack([len(top) for top in tops or []], wire_arrays.U32),
            top_token_ids=wire_arrays.pack([token_id for token_id, _ in flat]),
            top_logprobs=wire_arrays.pack([logprob for _, logprob in flat], wire_arrays.F32),
        )
    )


def finished(
    handle: int,
    num_tokens: int,
    reason: int = common_pb2.FINISH_REASON_LENGTH,
    *,
    choice: int = 0,
    last: bool = True,
    score: float | None = None,
) -> engine_pb2.EngineMessage:
    """The end of a choice; with `last` that of the request, with an account to recognise."""
    account = engine_pb2.RequestAccount(prompt_tokens=3, cached_prompt_tokens=1, queue_ns=5_000_000, num_preemptions=2)
    end = engine_pb2.Finished(
        handle=handle,
        choice=choice,
        reason=reason,
        num_output_tokens=num_tokens,
        last=last,
        account=account if last else None,
        score=score,
    )
    return engine_pb2.EngineMessage(finished=[end])


@dataclass(eq=False)
class Attachment:
    """One stream of a gateway: what it said, and what to tell it."""

    hello: engine_pb2.FrontendHello
    said: asyncio.Queue[engine_pb2.FrontendMessage] = field(default_factory=asyncio.Queue)
    outgoing: asyncio.Queue[engine_pb2.EngineMessage | None] = field(default_factory=asyncio.Queue)

    def send(self, *messages: engine_pb2.EngineMessage) -> None:
        """To the gateway, in order."""
        for message in messages:
            self.outgoing.put_nowait(message)

    def break_off(self) -> None:
        """Ends the stream with an error."""
        self.outgoing.put_nowait(None)

    async def next_submits(self, num: int) -> list[engine_pb2.Submit]:
        """So many submits, in however many messages."""
        found: list[engine_pb2.Submit] = []
        while len(found) < num:
            found += (await self.next()).submits
        assert len(found) == num
        return found

    async def next_submit(self) -> engine_pb2.Submit:
        """The next message must be one submit."""
        message = await self.next()
        assert len(message.submits) == 1, message
        return message.submits[0]

    async def next(self) -> engine_pb2.FrontendMessage:
        """What the gateway says next."""
        return await asyncio.wait_for(self.said.get(), PATIENCE_S)


class ScriptedEngine(engine_pb2_grpc.EngineServiceServicer):
    """EngineService. `attachments`: streams as gateways open them. `welcome`: sent first on each. It keeps no values."""

    def __init__(self) -> None:
        self.attachments: asyncio.Queue[Attachment] = asyncio.Queue()
        self.welcome = engine_pb2.Welcome(
            identity=rpc.Identity().message(), limits=limits(), state=engine_pb2.ServiceState(serving=True)
        )
        self.bundle = models.tiny_bundle()
        self.address = ""

    async def attached(self) -> Attachment:
        """The next stream that a gateway opens."""
        return await asyncio.wait_for(self.attachments.get(), PATIENCE_S)

    async def Attach(self, request_iterator, context):
        first = await anext(request_iterator)
        attachment = Attachment(first.hello)
        self.attachments.put_nowait(attachment)
        reader = asyncio.create_task(self._read(request_iterator, attachment))
        try:
            async with rpc.errors_to_status(context):
                yield engine_pb2.EngineMessage(welcome=self.welcome)
                while (message := await attachment.outgoing.get()) is not None:
                    yield message
                raise Unavailable("broken off by the test")
        finally:
            reader.cancel()

    async def _read(self, messages, attachment: Attachment) -> None:
        with contextlib.suppress(grpc.aio.AioRpcError):
            async for message in messages:
                attachment.said.put_nowait(message)
                if message.HasField("goodbye"):
                    attachment.break_off()

    async def GetModelBundle(self, request, context):
        for start in range(0, len(self.bundle), 50_000):
            yield engine_pb2.GetModelBundleResponse(chunk=self.bundle[start : start + 50_000])

    async def PutValue(self, request, context):
        return engine_pb2.PutValueResponse(kept=False)

    async def GetValue(self, request, context):
        return engine_pb2.GetValueResponse()

    async def DeleteValue(self, request, context):
        return engine_pb2.DeleteValueResponse(deleted=False)


@contextlib.asynccontextmanager
async def engine(port: int = 0, host: str = "127.0.0.1") -> AsyncIterator[ScriptedEngine]:
    """A scripted scheduler that listens."""
    servicer = ScriptedEngine()
    server = rpc.server()
    engine_pb2_grpc.add_EngineServiceServicer_to_server(servicer, server)
    servicer.address = f"{host}:{rpc.bind(server, host, port, option='--port')}"
    await server.start()
    try:
        yield servicer
    finally:
        await server.stop(0)


@dataclass
class Gateway:
    """A running gateway: addresses, and a stub on its gRPC door."""

    grpc: str
    http: str
    admin: str
    admin_http: str
    channel: grpc.aio.Channel
    stub: inference_pb2_grpc.InferenceServiceStub
    stop: asyncio.Event
    task: asyncio.Task[None]


@contextlib.asynccontextmanager
async def gateway(*schedulers: str, **changes: Any) -> AsyncIterator[Gateway]:
    """A real gateway in this process."""
    ports = dict.fromkeys(("grpc_port", "http_port", "admin_port", "admin_http_port"), 0)
    settings = GatewaySettings(schedulers=schedulers, **{"drain_s": 0.0, **ports, **changes})
    ready: asyncio.Future[tuple[str, str, str, str]] = asyncio.get_running_loop().create_future()
    stop = asyncio.Event()
    task = asyncio.create_task(app.serve(settings, on_ready=lambda *a: ready.set_result(a), stop=stop))
    await asyncio.wait((task, ready), return_when=asyncio.FIRST_COMPLETED)
    if task.done():
        task.result()
    addresses = ready.result()
    try:
        async with grpc.aio.insecure_channel(addresses[0]) as channel:
            stub = inference_pb2_grpc.InferenceServiceStub(channel)
            yield Gateway(*addresses, channel, stub, stop, task)
    finally:
        stop.set()
        await task


@contextlib.asynccontextmanager
async def pair(**changes: Any) -> AsyncIterator[tuple[ScriptedEngine, Attachment, Gateway]]:
    """Both, attached."""
    async with engine() as scheduler, gateway(scheduler.address, **changes) as running:
        yield scheduler, await scheduler.attached(), running
