"""Composition root of a worker: builds every part, listens, and stops in order. Nothing is built elsewhere.

Order of stopping: health NOT_SERVING, no new steps, steps in flight are finished and sent, then the server
and the engine thread end. A worker that has lost its engine stops in the same order and exits with the
reason: only a new process can recover.
"""

import asyncio
import contextlib
import logging
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from protos.worker.v1 import worker_pb2, worker_pb2_grpc
from svc_common import garbage
from svc_common.net import rpc
from svc_common.net.health import ServiceHealth
from svc_common.net.peers import Peers
from svc_common.net.tls_settings import SCHEDULER, WORKER
from svc_common.observability import telemetry
from svc_common.observability.metrics import DroppedSpans, new_registry
from svc_common.observability.metrics_server import MetricsServer
from svc_common.signals import stop_on_signals
from worker_svc.engine import DeviceLost, Engine
from worker_svc.settings import ShellSettings, WorkerSettings
from worker_svc.shell.block_transfer import BlockTransfer
from worker_svc.shell.engine_thread import EngineThread
from worker_svc.shell.lifecycle import READY, Lifecycle
from worker_svc.shell.metric_definitions import METRICS
from worker_svc.shell.metrics import StepMeter
from worker_svc.shell.owned_steps import OwnedSteps
from worker_svc.shell.ownership import Ownership
from worker_svc.shell.service import WorkerService
from worker_svc.shell.step_spans import StepSpans

log = logging.getLogger(__name__)

SERVICE_NAME = worker_pb2.DESCRIPTOR.services_by_name["WorkerService"].full_name
PIPELINE_DEPTH = 16
"""Maximum steps in flight, and number of results kept for a scheduler that reconnects."""
_HEALTH_NAMES = ("", SERVICE_NAME)
_STREAM_GRACE_S = 1.0
_STEP_GRACE_S = 10.0


@dataclass(frozen=True, slots=True)
class Watchers:
    """Callbacks of a worker process.

    `on_budget`: the memory budget as a table, once known. `on_progress`: progress of loading (stage, 0..1).
    `on_metrics`: address of the metrics (HOST:PORT), before the worker listens.
    """

    on_budget: Callable[[str], None] = lambda readable: print(readable, file=sys.stderr, flush=True)  # noqa: T201
    on_progress: Callable[[str, float], None] = lambda stage, fraction: log.debug("%s %.0f %%", stage, 100 * fraction)
    on_metrics: Callable[[str], None] = lambda address: log.debug("metrics at %s", address)


WatchEngine = Callable[[Callable[[Exception], object]], None]


async def serve(
    settings: WorkerSettings,
    *,
    on_ready: Callable[[str], None],
    watchers: Watchers | None = None,
    stop: asyncio.Event | None = None,
) -> None:
    """Run a worker with a model until SIGTERM, SIGINT or `stop`.

    `on_ready` gets HOST:PORT as soon as the worker listens; the model loads in the background. Raises
    ConfigError if the port is taken or the model cannot be loaded (calls of LoadModel get the reason too),
    Unavailable (DEVICE_LOST) if the engine is lost.
    """
    if settings.num_ranks > 1:
        await _serve_rank(settings, on_ready=on_ready, watchers=watchers or Watchers(), stop=stop)
        return
    await serve_engine(settings, lambda: _model_engine(settings), on_ready=on_ready, watchers=watchers, stop=stop)


def _model_engine(settings: WorkerSettings) -> Engine:
    # Imported here because it takes seconds and needs torch. Runs on the engine thread.
    with garbage.importing():
        from worker_svc.executor.model_engine import ModelEngine  # noqa: PLC0415

    return ModelEngine(settings)


async def _serve_rank(
    settings: WorkerSettings, *, on_ready: Callable[[str], None], watchers: Watchers, stop: asyncio.Event | None
) -> None:
    """Run this rank of a group: rank 0 is a worker with the group as its engine, the others follow it."""
    # Imported here because they take seconds and need torch.
    with garbage.importing():
        from worker_svc.executor.model_engine import ModelEngine  # noqa: PLC0415
        from worker_svc.ranks.follower import serve_follower  # noqa: PLC0415
        from worker_svc.ranks.group_engine import GroupEngine  # noqa: PLC0415
        from worker_svc.ranks.joining import Meeting  # noqa: PLC0415
        from worker_svc.ranks.member import GroupRanks  # noqa: PLC0415

    def make(ranks: GroupRanks) -> ModelEngine:
        return ModelEngine(settings, ranks=ranks)

    if settings.rank:
        await serve_follower(settings, make, on_ready=on_ready, stop=stop)
        return
    tell: list[Callable[[Exception], object]] = []

    def on_lost(error: DeviceLost) -> None:
        for each in tell:
            each(error)

    group = GroupEngine(settings, Meeting(settings), make, on_lost)
    try:
        await serve_engine(
            settings, lambda: group, on_ready=on_ready, watchers=watchers, stop=stop, watch_engine=tell.append
        )
    finally:
        group.close()


async def serve_engine(
    settings: ShellSettings,
    make_engine: Callable[[], Engine],
    *,
    on_ready: Callable[[str], None],
    watchers: Watchers | None = None,
    stop: asyncio.Event | None = None,
    watch_engine: WatchEngine = lambda on_lost: None,
) -> None:
    """Run a worker with any engine, as `serve` does. `make_engine` is called on the engine thread.

    `watch_engine` gets a function for any thread, to be called with an error when the engine is lost outside its calls.
    """
    stop = stop or asyncio.Event()
    worker = _Worker(settings, make_engine, watchers or Watchers())
    try:
        address = await worker.start(settings)
        with stop_on_signals(stop):
            loop = asyncio.get_running_loop()
            watch_engine(lambda error: loop.call_soon_threadsafe(worker.owned_steps.lose_engine, error))
            worker.lifecycle.load()
            on_ready(address)
            await _until(stop, worker.lifecycle)
    finally:
        await worker.stop()


class _Worker:
    """All parts of one worker process."""

    def __init__(self, settings: ShellSettings, make_engine: Callable[[], Engine], watchers: Watchers) -> None:
        self.identity = rpc.Identity()
        self.tracing = telemetry.setup("worker", instance_id=self.identity.boot_id, samples_own_roots=True)
        self.health = ServiceHealth()
        self.thread = EngineThread(asyncio.get_running_loop())
        self._announced: set[asyncio.Task[None]] = set()
        self._watchers = watchers
        self.registry = new_registry(METRICS, lambda: self.lifecycle.limits.model if self.lifecycle.limits else "")
        self.registry.register(DroppedSpans(self.tracing))
        self.lifecycle = Lifecycle(
            make_engine,
            self.thread,
            on_state=self._on_state,
            on_budget=watchers.on_budget,
            on_progress=watchers.on_progress,
        )
        self.owned_steps = OwnedSteps(
            self.lifecycle,
            self.thread,
            Ownership(self.identity.boot_id, lease_s=settings.owner_lease_s, ring_depth=PIPELINE_DEPTH),
            self.identity,
            StepSpans(self.tracing, interval=settings.step_span_interval),
            StepMeter(self.registry, lambda: self.lifecycle.state == READY),
            max_open=PIPELINE_DEPTH,
        )
        self.peers = Peers(settings.peers)
        self.metrics = MetricsServer(self.registry)
        self.server = self.peers.server(SCHEDULER, also={f"/{SERVICE_NAME}/ReadBlocks": WORKER})
        self._add_services()

    def _add_services(self) -> None:
        transfer = BlockTransfer(
            self.lifecycle, self.thread, self.peers, self.identity.boot_id, lambda: self.owned_steps.epoch
        )
        service = WorkerService(self.lifecycle, self.owned_steps, transfer, self.identity)
        worker_pb2_grpc.add_WorkerServiceServicer_to_server(service, self.server)
        health_pb2_grpc.add_HealthServicer_to_server(self.health.servicer, self.server)
        names = (SERVICE_NAME, health_pb2.DESCRIPTOR.services_by_name["Health"].full_name, reflection.SERVICE_NAME)
        reflection.enable_server_reflection(names, self.server)

    def _on_state(self, state: worker_pb2.WorkerState) -> None:
        log.info("worker is %s", worker_pb2.WorkerState.Name(state).removeprefix("WORKER_STATE_").lower())
        task = asyncio.ensure_future(self.health.set(_HEALTH_NAMES, serving=state == READY))
        self._announced.add(task)
        task.add_done_callback(self._announced.discard)

    async def start(self, settings: ShellSettings) -> str:
        await self.health.start()
        await self.health.set(_HEALTH_NAMES, serving=False)
        port = self.peers.bind(self.server, settings.host, settings.port, option="--port")
        tls = self.peers.http_context(settings.host)
        self._watchers.on_metrics(self.metrics.start(settings.host, settings.metrics_port, tls))
        await self.server.start()
        return f"{settings.host}:{port}"

    async def stop(self) -> None:
        self.metrics.close()
        await self.health.drain()
        is_loading = self.lifecycle.stop_loading()
        if not is_loading:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_STEP_GRACE_S):
                    await self.owned_steps.drain()
        # grpc logs a traceback for a call whose connection breaks while it is cut off.
        logging.getLogger("grpc._cython.cygrpc").setLevel(logging.CRITICAL)
        await self.server.stop(0 if is_loading else _STREAM_GRACE_S)
        is_idle = await self.thread.stop(0 if is_loading else _STREAM_GRACE_S)
        self.tracing.shutdown()
        if not is_idle:
            log.log(
                logging.INFO if is_loading else logging.WARNING, "the engine is still busy; the process ends without it"
            )


async def _until(stop: asyncio.Event, lifecycle: Lifecycle) -> None:
    """Wait for `stop`. Raises at once if the model cannot be loaded or the engine is lost."""
    stopped, lost = asyncio.create_task(stop.wait()), asyncio.create_task(lifecycle.until_lost())
    waiting: set[asyncio.Task[Any]] = {stopped, lost, lifecycle.load()}
    try:
        while not stopped.done():
            done, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
    finally:
        stopped.cancel()
        lost.cancel()
