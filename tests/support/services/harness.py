"""The scheduler service with a simulated worker in this process, over real gRPC, and a gateway's end of Attach to talk to it."""

import asyncio
import contextlib
import functools
import itertools
from collections import deque
from collections.abc import AsyncIterator, Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np

from protos.common.v1 import common_pb2
from protos.engine.v1 import engine_pb2, engine_pb2_grpc
from protos.inference.v1 import admin_pb2, admin_pb2_grpc
from quire.local_stack.ports import reserved
from quire_tools.simulated_worker.app import serve_simulated
from quire_tools.simulated_worker.settings import SimulatedWorkerSettings
from scheduler_svc import app
from scheduler_svc.settings import SchedulerSettings
from svc_common import wire_arrays
from svc_common.net import rpc
from worker_svc.app import Watchers, serve_engine
from worker_svc.engine import Engine

TIMEOUT_S = 40.0
T = TypeVar("T")


def once(ask: Callable[..., Coroutine[Any, Any, T]]) -> Callable[..., Coroutine[Any, Any, T]]:
    """Cache what a coroutine function returns for its arguments: for runs that others are compared with."""
    found: dict[object, T] = {}

    @functools.wraps(ask)
    async def asked(*args: Any) -> T:
        if args not in found:
            found[args] = await ask(*args)
        return found[args]

    return asked


def run_async(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """A test that is a coroutine, bounded in time."""

    @functools.wraps(test)
    def run(*args: Any, **kwargs: Any) -> None:
        async def bounded() -> None:
            async with asyncio.timeout(3 * TIMEOUT_S):
                await test(*args, **kwargs)

        asyncio.run(bounded())

    return run


async def eventually(condition: Callable[[], Any], what: str, timeout_s: float = TIMEOUT_S) -> None:
    """Waits until `condition()` is true."""
    deadline = asyncio.get_running_loop().time() + timeout_s
    while not condition():
        assert asyncio.get_running_loop().time() < deadline, f"not within {timeout_s} s: {what}"
        await asyncio.sleep(0.005)


@contextlib.asynccontextmanager
async def service(
    start: Callable[[Callable[..., None], asyncio.Event], Coroutine[Any, Any, None]],
) -> AsyncIterator[Any]:
    """Runs a `serve(on_ready=, stop=)` as a task; yields what `on_ready` got."""
    ready: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
    stop = asyncio.Event()
    task = asyncio.create_task(start(lambda *args: ready.set_result(args), stop))
    try:
        await asyncio.wait({ready, task}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            task.result()
        yield await ready
    finally:
        stop.set()
        await task


_NUM_HELD = 120
_held: deque[contextlib.ExitStack] = deque()


def fresh_port() -> int:
    """A free port that none of the services before this one in the process had.

    The last `_NUM_HELD` stay reserved, so that no connection that is still being closed, or made again, meets another service.
    """
    held = contextlib.ExitStack()
    port = held.enter_context(reserved("127.0.0.1", {"port": 0}))["port"]
    _held.append(held)
    if len(_held) > _NUM_HELD:
        _held.popleft().close()
    return port


_QUIET = Watchers(on_budget=lambda readable: None, on_progress=lambda stage, fraction: None)


def worker(make_engine: Callable[[SimulatedWorkerSettings], Engine] | None = None, **values: Any) -> Any:
    """A simulated worker; yields (HOST:PORT,). `make_engine`: another engine around it."""
    # The core checks all blocks after each step here.
    defaults = {"port": fresh_port(), "time_scale": 0.0, "owner_lease_s": 0.5, "num_gpu_blocks": 512}
    settings = SimulatedWorkerSettings.of(**{**defaults, **values})
    if make_engine is None:
        return service(lambda ready, stop: serve_simulated(settings, on_ready=ready, watchers=_QUIET, stop=stop))
    return service(
        lambda ready, stop: serve_engine(
            settings, lambda: make_engine(settings), on_ready=ready, watchers=_QUIET, stop=stop
        )
    )


def scheduler(*worker_addresses: str, **values: Any) -> Any:
    """The scheduler; yields (address, admin address)."""
    return service(lambda ready, stop: _serve_scheduler(worker_addresses, values, lambda *at: ready(*at[:2]), stop))


def _serve_scheduler(
    worker_addresses: tuple[str, ...], values: dict[str, Any], ready: Callable[..., None], stop: asyncio.Event
) -> Coroutine[Any, Any, None]:
    ports = {name: fresh_port() for name in ("port", "admin_port", "metrics_port")}
    defaults = {**ports, "drain_s": 0.0, "reconnect_backoff_s": 0.2, "integrity_check_every": 1}
    settings = SchedulerSettings(workers=worker_addresses, **{**defaults, **values})
    return app.serve(settings, on_ready=ready, stop=stop)


@dataclass
class Output:
    """What came for one handle. Tokens are checked for gaps and repeats as they come. `others`: of choices beside the first;
    `ends`: of choices."""

    tokens: list[int] = field(default_factory=list)
    others: dict[int, list[int]] = field(default_factory=dict)
    ends: dict[int, engine_pb2.Finished] = field(default_factory=dict)
    tops: list[list[int]] = field(default_factory=list)
    prompt_logprobs: engine_pb2.PromptLogprobs | None = None
    embedding: bytes = b""
    logprobs: list[float] = field(default_factory=list)
    started: engine_pb2.Started | None = None
    finished: engine_pb2.Finished | None = None
    failed: engine_pb2.Failed | None = None
    num_ends: int = 0

    @property
    def is_over(self) -> bool:
        return self.num_ends > 0

    @property
    def choices(self) -> list[list[int]]:
        return [self.tokens, *(self.others[choice] for choice in sorted(self.others))]

    def of(self, choice: int) -> list[int]:
        return self.others.setdefault(choice, []) if choice else self.tokens


class Gateway:
    """A gateway's end of one Attach stream; `outputs` by handle outlives streams."""

    def __init__(self, address: str, frontend_id: str = "gateway-1") -> None:
        self.frontend_id = frontend_id
        self.outputs: dict[int, Output] = {}
        self.states: list[engine_pb2.ServiceState] = []
        self.queues: list[engine_pb2.QueueState] = []
        self.attached: dict[int, engine_pb2.HeldRequest] = {}
        self.num_messages = 0
        self.welcome = engine_pb2.Welcome()
        self.paused = asyncio.Event()
        self.paused.set()
        self._channel = rpc.channel(address)
        self._stub = engine_pb2_grpc.EngineServiceStub(self._channel)
        self._handles = itertools.count(1)
        self._reader: asyncio.Task[None] | None = None
        self.stream: Any = None

    async def attach(self) -> engine_pb2.Welcome:
        self.stream = self._stub.Attach()
        hello = engine_pb2.FrontendHello(identity=rpc.Identity().message(), frontend_id=self.frontend_id)
        await self.stream.write(engine_pb2.FrontendMessage(hello=hello))
        self.welcome = (await self.stream.read()).welcome
        self.states.append(self.welcome.state)
        self._reader = asyncio.create_task(self._read())
        return self.welcome

    async def __aenter__(self) -> "Gateway":
        await self.attach()
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.lose_stream()
        await self._channel.close()

    async def lose_stream(self) -> None:
        if self._reader is not None:
            self._reader.cancel()
            await asyncio.gather(self._reader, return_exceptions=True)
            self._reader = None
        if self.stream is not None:
            self.stream.cancel()
            self.stream = None

    async def _read(self) -> None:
        while isinstance(message := await self.stream.read(), engine_pb2.EngineMessage):
            self.num_messages += 1
            if message.HasField("state"):
                self.states.append(message.state)
            if message.HasField("queue"):
                self.queues.append(message.queue)
            self._take(message)
            await self.paused.wait()

    def _take(self, message: engine_pb2.EngineMessage) -> None:
        self.attached.update((held.handle, held) for held in message.attached)
        for started in message.started:
            self.outputs[started.handle].started = started
        self._take_tokens(message.tokens)
        for prompt in message.prompt_logprobs:
            self.outputs[prompt.handle].prompt_logprobs = prompt
        for embedding in message.embeddings:
            self.outputs[embedding.handle].embedding = embedding.values
        for finished in message.finished:
            output = self.outputs[finished.handle]
            assert finished.choice not in output.ends and not output.is_over
            output.ends[finished.choice] = finished
            if finished.last:
                output.finished, output.num_ends = finished, output.num_ends + 1
        for failed in message.failed:
            output = self.outputs.setdefault(failed.handle, Output())
            output.failed, output.num_ends = failed, output.num_ends + 1

    def _take_tokens(self, tokens: engine_pb2.TokenColumns) -> None:
        handles = wire_arrays.unpack(tokens.handles, "handles", wire_arrays.U32).tolist()
        offsets = wire_arrays.unpack(tokens.token_offsets, "offsets", wire_arrays.U32, length=len(handles)).tolist()
        counts = wire_arrays.unpack(tokens.counts, "counts", wire_arrays.U32, length=len(handles))
        choices = wire_arrays.unpack(tokens.choices, "choices", wire_arrays.U32, length=len(handles)).tolist()
        runs = wire_arrays.split(wire_arrays.unpack(tokens.token_ids, "token_ids"), counts, "token_ids")
        logprobs = wire_arrays.unpack(tokens.logprobs, "logprobs", wire_arrays.F32)
        values = wire_arrays.split(logprobs, counts, "logprobs") if len(logprobs) else [np.zeros(0)] * len(handles)
        for handle, choice, offset, run, value in zip(handles, choices, offsets, runs, values, strict=True):
            output, known = self.outputs[handle], self.outputs[handle].of(choice)
            assert offset == len(known), f"handle {handle}/{choice}: run at {offset} after {len(known)} tokens"
            assert choice not in output.ends, f"handle {handle}/{choice}: a run after its end"
            known += run.tolist()
            if not choice:
                output.logprobs += value.tolist()

    # --- saying things --------------------------------------------------------------------------------------------

    async def send(self, **parts: Any) -> None:
        await self.stream.write(engine_pb2.FrontendMessage(**parts))

    async def submit(self, prompt: list[int], **values: Any) -> int:
        """Submits one request and returns its handle."""
        message = self.make_submit(prompt, **values)
        await self.send(submits=[message])
        return message.handle

    async def submit_all(self, prompts: list[list[int]], **values: Any) -> list[int]:
        """Several in one message: no step comes between them. Their handles."""
        messages = [self.make_submit(prompt, **values) for prompt in prompts]
        await self.send(submits=messages)
        return [message.handle for message in messages]

    async def leave(self, handle: int) -> None:
        """Cancels it and waits for its end."""
        await self.send(cancels=[engine_pb2.Cancel(handle=handle)])
        assert (await self.end_of(handle)).finished is not None

    async def attach_to(self, request_id: str, *, handle: int | None = None, tenant: str = "") -> int:
        """Reads a request on and returns its handle."""
        handle = self.expect(next(self._handles) if handle is None else handle)
        await self.send(attaches=[engine_pb2.Attach(handle=handle, request_id=request_id, tenant=tenant)])
        return handle

    def expect(self, handle: int) -> int:
        """Something will come for this handle."""
        self.outputs.setdefault(handle, Output())
        return handle

    def make_submit(
        self, prompt: list[int], *, handle: int = 0, max_tokens: int = 8, **values: Any
    ) -> engine_pb2.Submit:
        handle = handle or next(self._handles)
        self.outputs.setdefault(handle, Output())
        sampling = common_pb2.ResolvedSampling(top_p=1.0, seed=7, logprobs=values.pop("logprobs", False))
        stop = values.pop("stop", None) or common_pb2.StopRules(max_tokens=max_tokens, ignore_eos=True)
        committed = values.pop("committed", None)
        if committed is not None:
            values["committed"] = [engine_pb2.CommittedTokens(token_ids=wire_arrays.pack(committed))]
        return engine_pb2.Submit(
            handle=handle,
            request_id=values.pop("request_id", f"{self.frontend_id}-{handle}"),
            token_ids=wire_arrays.pack(prompt),
            sampling=values.pop("sampling", sampling),
            stop=stop,
            num_choices=values.pop("num_choices", 1),
            **values,
        )

    async def end_of(self, handle: int) -> Output:
        """Waits for the request's end."""
        output = self.outputs[handle]
        await eventually(lambda: output.is_over, f"end of handle {handle}")
        return output

    async def tokens_of(self, handle: int, at_least: int) -> Output:
        output = self.outputs[handle]
        await eventually(lambda: len(output.tokens) >= at_least or output.is_over, f"{at_least} tokens of {handle}")
        return output


class Admin:
    """The admin API."""

    def __init__(self, address: str) -> None:
        self._channel = rpc.channel(address)
        self.stub = admin_pb2_grpc.AdminServiceStub(self._channel)

    async def __aenter__(self) -> "Admin":
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self._channel.close()

    async def blocks(self) -> admin_pb2.GetBlocksResponse:
        return await self.stub.GetBlocks(admin_pb2.GetBlocksRequest())

    async def steps(self, **values: Any) -> list[admin_pb2.StepReport]:
        return [report async for report in self.stub.WatchScheduler(admin_pb2.WatchSchedulerRequest(**values))]

    async def assert_all_free(self) -> None:
        """Every block is back and the ledger agrees (R17)."""
        blocks = await self.blocks()
        assert blocks.gpu.free == blocks.gpu.total, f"{blocks.gpu.total - blocks.gpu.free} blocks leaked"
        assert not blocks.tables and not blocks.refs


@dataclass
class Stack:
    """Everything running."""

    gateway: Gateway
    admin: Admin
    address: str
    admin_address: str
    worker_address: str
    metrics_address: str


@contextlib.asynccontextmanager
async def stack(
    worker_values: dict[str, Any] | None = None,
    make_engine: Callable[[SimulatedWorkerSettings], Engine] | None = None,
    **values: Any,
) -> AsyncIterator[Stack]:
    """Worker, scheduler, one attached gateway and an admin client; ready to serve."""
    async with (
        worker(make_engine, **(worker_values or {})) as (worker_address,),
        service(lambda ready, stop: _serve_scheduler((worker_address,), values, ready, stop)) as addresses,
        Admin(addresses[1]) as admin,
        Gateway(addresses[0]) as gateway,
    ):
        await eventually(lambda: gateway.states[-1].serving, "a worker is ready")
        address, admin_address, metrics_address = addresses
        yield Stack(gateway, admin, address, admin_address, worker_address, metrics_address)
