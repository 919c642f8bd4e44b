"""A worker's states from empty process to ready: load, profile, allocate (worker.proto `WorkerState`)."""

import asyncio
import hashlib
import logging
from collections.abc import AsyncIterator, Callable

from protos.common.v1 import common_pb2
from protos.worker.v1 import worker_pb2
from svc_common.errors import ConfigError, FailedPrecondition, Internal, InvalidArgument, NotFound, QuireError
from worker_svc.engine import Engine
from worker_svc.rows.changes import MOST_ROWS, MOST_STEP_TOKENS
from worker_svc.shell.engine_thread import EngineThread

log = logging.getLogger(__name__)

STARTED = worker_pb2.WORKER_STATE_STARTED
LOADING = worker_pb2.WORKER_STATE_LOADING
LOADED = worker_pb2.WORKER_STATE_LOADED
READY = worker_pb2.WORKER_STATE_READY
FAILED = worker_pb2.WORKER_STATE_FAILED


class Lifecycle:
    """Owner of the engine and of the worker's state. Engine calls go through `thread`.

    `make_engine` runs on that thread too, since importing a model library takes seconds. `on_state` is called
    with every new state, `on_budget` with the memory budget as a table, `on_progress` with the progress of
    loading.
    """

    def __init__(
        self,
        make_engine: Callable[[], Engine],
        thread: EngineThread,
        *,
        on_state: Callable[[worker_pb2.WorkerState], None],
        on_budget: Callable[[str], None],
        on_progress: Callable[[str, float], None],
    ) -> None:
        self.state: worker_pb2.WorkerState = STARTED
        self.limits: common_pb2.ModelLimits | None = None
        self._make_engine, self._thread = make_engine, thread
        self._on_state, self._on_budget, self._on_progress = on_state, on_budget, on_progress
        self._engine: Engine | None = None
        self._bundle = b""
        self._loading: asyncio.Task[None] | None = None
        self._progress = ("starting", 0.0)
        self._moved = asyncio.Event()
        self._lost = asyncio.Event()
        self._loss: QuireError | None = None
        self._setup = asyncio.Lock()
        self._profiled: tuple[int, int] = (0, 0)
        self._profile: worker_pb2.ProfileCacheResponse | None = None
        self._allocated: tuple[int, int] | None = None

    @property
    def engine(self) -> Engine:
        """The engine; raises FailedPrecondition before the model is loaded."""
        if self._engine is None or self.limits is None:
            raise self._not_yet("the model is not loaded", "call LoadModel and wait until it ends")
        return self._engine

    def require_ready(self) -> None:
        """Raise FailedPrecondition, saying what to do, unless steps can run."""
        if self.state == FAILED:
            raise self._not_yet("this worker has failed", "restart its process")
        _ = self.engine
        if self.state != READY:
            raise self._not_yet("the cache is not allocated", "call ProfileCache, then AllocateCache")

    def _not_yet(self, what: str, remedy: str) -> FailedPrecondition:
        state = worker_pb2.WorkerState.Name(self.state)
        return FailedPrecondition(f"{what}; {remedy}", reason="WORKER_STATE", metadata={"state": state})

    def _enter(self, state: worker_pb2.WorkerState) -> None:
        self.state = state
        self._on_state(state)

    def fail(self, why: QuireError) -> None:
        """Enter FAILED: the engine is lost and only a restart of the process helps."""
        self._loss = why
        self._enter(FAILED)
        self._lost.set()

    async def until_lost(self) -> None:
        """Wait for `fail` and raise its error."""
        await self._lost.wait()
        assert self._loss is not None
        raise self._loss

    # --- loading -----------------------------------------------------------------------------------------------------

    def load(self) -> asyncio.Task[None]:
        """Start loading, once; later calls return the same task, which raises the engine's error."""
        if self._loading is None:
            self._enter(LOADING)
            self._loading = asyncio.create_task(self._load(), name="load-model")
        return self._loading

    def stop_loading(self) -> bool:
        """Stop waiting for a load in progress; the engine thread continues it. False if there is none."""
        return self._loading is not None and self._loading.cancel()

    async def _load(self) -> None:
        loop = asyncio.get_running_loop()

        def progress(stage: str, fraction: float) -> None:
            loop.call_soon_threadsafe(self._report, stage, fraction)

        def job() -> tuple[Engine, common_pb2.ModelLimits, bytes]:
            engine = self._make_engine()
            limits = engine.load(progress)
            return engine, limits, engine.bundle()

        try:
            engine, limits, bundle = await self._thread.submit(job)
            _check_bundle(limits, bundle)
        except BaseException:
            self._enter(FAILED)
            raise
        self._engine, self.limits, self._bundle = engine, limits, bundle
        self._enter(LOADED)

    def _report(self, stage: str, fraction: float) -> None:
        self._progress = (stage, min(max(fraction, 0.0), 1.0))
        self._on_progress(*self._progress)
        self._moved.set()
        self._moved = asyncio.Event()

    async def load_progress(self) -> AsyncIterator[worker_pb2.LoadModelResponse]:
        """Stream the progress until the model is loaded; the last message has `loaded`.

        Raises the reason of a failed load.
        """
        loading = self.load()
        while not loading.done():
            stage, fraction = self._progress
            moved = asyncio.ensure_future(self._moved.wait())
            try:
                yield worker_pb2.LoadModelResponse(stage=stage, fraction=fraction)
                await asyncio.wait([moved, loading], return_when=asyncio.FIRST_COMPLETED)
            finally:
                moved.cancel()
        try:
            loading.result()
        except ConfigError as error:
            # A configuration error of the operator, not of this call.
            raise FailedPrecondition(error.message, reason=error.reason, metadata=error.metadata) from error
        yield worker_pb2.LoadModelResponse(stage="loaded", fraction=1.0, loaded=self.limits)

    # --- cache -------------------------------------------------------------------------------------------------------

    async def profile(self, num_tokens: int, num_seqs: int) -> worker_pb2.ProfileCacheResponse:
        """Run the largest step once. Returns the earlier answer if a step as large was profiled before."""
        _check_fits("max_num_batched_tokens", num_tokens, MOST_STEP_TOKENS, least=1)
        _check_fits("max_num_seqs", num_seqs, MOST_ROWS, least=1)
        async with self._setup:
            engine = self.engine
            if self._profile is not None and num_tokens <= self._profiled[0] and num_seqs <= self._profiled[1]:
                return self._profile
            if self._allocated is not None:
                raise self._not_yet(
                    f"the cache is allocated for steps of {self._profiled[0]} tokens and {self._profiled[1]} sequences, "
                    f"not {num_tokens} and {num_seqs}",
                    "restart the worker for larger steps",
                )
            self._profile = await self._thread.submit(lambda: engine.profile(num_tokens, num_seqs))
            self._profiled = (num_tokens, num_seqs)
            self._on_budget(self._profile.readable)
            return self._profile

    async def allocate(self, num_gpu_blocks: int, num_cpu_blocks: int) -> None:
        """Allocate the cache; no-op if it has these counts already."""
        async with self._setup:
            engine = self.engine
            if self._profile is None:
                raise self._not_yet("the number of blocks that fit is not known", "call ProfileCache first")
            if self._allocated is not None:
                self._check_same(num_gpu_blocks, num_cpu_blocks)
                return
            _check_fits("num_gpu_blocks", num_gpu_blocks, self._profile.num_gpu_blocks, least=1)
            _check_fits("num_cpu_blocks", num_cpu_blocks, self._profile.num_cpu_blocks, least=0)
            await self._thread.submit(lambda: engine.allocate(num_gpu_blocks, num_cpu_blocks))
            self._allocated = (num_gpu_blocks, num_cpu_blocks)
            self._enter(READY)

    def _check_same(self, num_gpu_blocks: int, num_cpu_blocks: int) -> None:
        if self._allocated != (num_gpu_blocks, num_cpu_blocks):
            assert self._allocated is not None
            has, wanted = self._allocated, (num_gpu_blocks, num_cpu_blocks)
            raise self._not_yet(
                f"the cache has {has[0]} device and {has[1]} host blocks, not {wanted[0]} and {wanted[1]}",
                "use its present counts, or restart the worker",
            )

    # --- adapters ----------------------------------------------------------------------------------------------------

    async def load_adapter(self, adapter_id: int, path: str) -> tuple[int, int]:
        """Load an adapter between two steps and return its bytes and rank. See Engine."""
        engine = self.engine
        return await self._thread.submit(lambda: engine.load_adapter(adapter_id, path))

    async def unload_adapter(self, adapter_id: int) -> None:
        """Unload an adapter between two steps. See Engine."""
        engine = self.engine
        await self._thread.submit(lambda: engine.unload_adapter(adapter_id))

    # --- bundle ------------------------------------------------------------------------------------------------------

    def bundle(self, digest: str) -> bytes:
        """The serialised model bundle; raises NotFound if `digest` names another one."""
        _ = self.engine
        assert self.limits is not None
        if digest and digest != self.limits.bundle_digest:
            raise NotFound(
                f"this worker has bundle {self.limits.bundle_digest}, not {digest}; retry with an empty digest",
                reason="BUNDLE_NOT_FOUND",
                metadata={"digest": self.limits.bundle_digest},
                resource_type="model bundle",
                resource_name=digest,
            )
        return self._bundle


def _check_bundle(limits: common_pb2.ModelLimits, bundle: bytes) -> None:
    digest = hashlib.sha256(bundle).hexdigest()
    if digest != limits.bundle_digest:
        raise Internal(f"bundle has digest {digest}, limits say {limits.bundle_digest}")


def _check_fits(field: str, value: int, most: int, *, least: int) -> None:
    if not least <= value <= most:
        raise InvalidArgument.field(field, f"is {value}; this worker allows {least} to {most}")
