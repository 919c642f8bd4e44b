"""Composition root of the scheduler service: builds all parts, listens, and stops them in order.

It imports neither torch nor transformers, so it listens within a second and queues requests while workers
load.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable

from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from protos.engine.v1 import engine_pb2, engine_pb2_grpc
from scheduler_svc.adapter_calls import AdapterCalls
from scheduler_svc.adapter_names import adapter_paths
from scheduler_svc.admin.load import LoadReport
from scheduler_svc.admin.service import SERVICE_NAME as ADMIN_SERVICE
from scheduler_svc.admin.service import AdminParts, AdminService
from scheduler_svc.gateways.engine_service import EngineServicer
from scheduler_svc.gateways.gateway_table import GatewayTable
from scheduler_svc.loop.step_loop import StepLoop
from scheduler_svc.observe.cost_feedback import CostFeedback
from scheduler_svc.observe.explanations import Explanations
from scheduler_svc.observe.integrity_check import IntegrityCheck
from scheduler_svc.observe.kv_events import KvEvents
from scheduler_svc.observe.metrics.failed_steps import FailedSteps
from scheduler_svc.observe.metrics.reading import Watched
from scheduler_svc.observe.metrics.service_metrics import SchedulerMetrics
from scheduler_svc.observe.preemption_warnings import PreemptionWarnings
from scheduler_svc.observe.recording.record_buffer import RecordBuffer
from scheduler_svc.observe.recording.recorder import AnyCore
from scheduler_svc.observe.spans import RequestSpans
from scheduler_svc.observe.step_log import StepLog
from scheduler_svc.observe.step_notifier import StepNotifier
from scheduler_svc.observe.step_observer import StepObserver
from scheduler_svc.policy.assembly import policy_of
from scheduler_svc.policy.choice import PolicyChoice
from scheduler_svc.readiness import Readiness
from scheduler_svc.requests.request_book import RequestBook
from scheduler_svc.requests.value_store import ValueStore
from scheduler_svc.settings import SchedulerSettings
from scheduler_svc.workers.adapter_registry import AdapterRegistry
from scheduler_svc.workers.cache_agreement import CacheAgreement
from scheduler_svc.workers.lane import WorkerLane
from scheduler_svc.workers.link import WorkerLink
from scheduler_svc.workers.roster import WorkerRoster
from svc_common.clock import monotonic_ns
from svc_common.net import rpc
from svc_common.net.health import ServiceHealth
from svc_common.net.names import DNS_SCHEME, AddressDirectory
from svc_common.net.peers import Peers
from svc_common.net.tls_settings import GATEWAY, OPERATOR, WORKER
from svc_common.observability import telemetry
from svc_common.observability.metrics_server import MetricsServer
from svc_common.signals import stop_on_signals

log = logging.getLogger(__name__)

ENGINE_SERVICE = engine_pb2.DESCRIPTOR.services_by_name["EngineService"].full_name
HEALTH_SERVICE = health_pb2.DESCRIPTOR.services_by_name["Health"].full_name


async def serve(
    settings: SchedulerSettings,
    *,
    on_ready: Callable[[str, str, str], None],
    stop: asyncio.Event | None = None,
) -> None:
    """Run the scheduler until SIGTERM, SIGINT or `stop`.

    `on_ready(address, admin_address, metrics_address)`, each HOST:PORT, is called once it listens; workers
    may connect later. Raises ConfigError for invalid settings and for ports in use.
    """
    check(settings)
    stop = stop or asyncio.Event()
    service = _SchedulerService(settings)
    try:
        await service.start()
        with stop_on_signals(stop):
            on_ready(service.address, service.admin_address, service.metrics_address)
            await service.run(stop)
    finally:
        await service.stop()


def check(settings: SchedulerSettings) -> None:
    """Raise ConfigError for settings that are known to be invalid before any worker has answered."""
    settings.worker_addresses()
    adapter_paths(settings.adapters)
    policy_of(settings)
    peers = Peers(settings.peers)
    for address in settings.workers:
        peers.check(address.removeprefix(DNS_SCHEME), WORKER)


class _SchedulerService:
    """All parts of one scheduler process. Must be constructed inside the event loop."""

    def __init__(self, settings: SchedulerSettings) -> None:
        self.address = self.admin_address = self.metrics_address = ""
        self._settings = settings
        self._identity = rpc.Identity()
        self._peers = Peers(settings.peers)
        self._telemetry = telemetry.setup("scheduler", instance_id=self._identity.boot_id)
        self._readiness = readiness = Readiness()
        self._spans = RequestSpans(self._telemetry, lambda: "" if readiness.serving else readiness.reason)
        self._book = RequestBook(settings, self._spans, monotonic_ns)
        self._log = StepLog(settings.max_logged_steps)
        self._record_buffer = RecordBuffer(
            settings.record_segment_steps, settings.record_ring_bytes, verbatim=settings.record_tokens
        )
        self._explanations = Explanations(self._book, self._readiness, settings.max_logged_events)
        self._kv_events = KvEvents(is_enabled=settings.kv_events)
        choice = policy_of(settings)
        self._adapters = AdapterRegistry(
            lambda: readiness.name_adapters(self._adapters.names),
            self._book.num_users,
            lambda: readiness.limits.model if readiness.limits else "",
        )
        for name, path in adapter_paths(settings.adapters).items():
            self._adapters.declare(name, path)
        self._directory = AddressDirectory(settings.worker_addresses(), settings.worker_lookup_s)
        self._roster = WorkerRoster(self._directory, self._lane_maker(choice))
        self._values = ValueStore(settings.max_stored_bytes, settings.stored_s, monotonic_ns)
        watched = Watched(
            settings, self._book, self._core, self._explanations, self._readiness, self._roster, self._values
        )
        self._metrics = SchedulerMetrics(watched, self._telemetry)
        self._loop = StepLoop(
            settings,
            choice,
            self._roster,
            self._book,
            StepNotifier(self._observers(), freezer=self._record_buffer.freezer),
            self._readiness,
            self._record_buffer,
            self._adapters.id_of,
            self._kv_events.watch,
        )
        self._metrics_server = MetricsServer(self._metrics.registry)
        call_later = asyncio.get_running_loop().call_later
        self._gateways = GatewayTable(self._book, self._readiness, settings.frontend_grace_s, call_later)
        self._health = ServiceHealth()
        self._health_task: asyncio.Task[None] | None = None
        self._server, self._admin_server = self._peers.server(GATEWAY), self._peers.server(GATEWAY, OPERATOR)

    def _core(self) -> AnyCore | None:
        """The core in use; None before the workers have reported their block counts."""
        return self._loop.core

    def _observers(self) -> list[StepObserver]:
        """All observers of steps, in the order in which they are called."""
        settings, metrics = self._settings, self._metrics
        return [
            self._spans,
            self._explanations,
            PreemptionWarnings(self._book.log_extra),
            CostFeedback(self._core),
            *([self._kv_events] if settings.kv_events else []),
            IntegrityCheck(self._core, settings.integrity_check_every),
            self._log,
            metrics.steps,
            FailedSteps(self._record_buffer, lambda: self.admin_address, time.monotonic),
            *([metrics.stats_line] if settings.stats_interval_s else []),
        ]

    def _lane_maker(self, choice: PolicyChoice) -> Callable[[int, str], WorkerLane]:
        """Makes the lane to a worker, given its number and address."""
        agreement = CacheAgreement(len(self._settings.workers) if choice.has_ranks else None)

        def make(number: int, address: str) -> WorkerLane:
            readiness = self._readiness.worker()
            link = WorkerLink(
                address, self._identity, self._settings, choice, readiness, agreement, self._adapters, self._peers
            )
            return WorkerLane(number, link, readiness)

        return make

    async def start(self) -> None:
        """Start listening; the admin server first, because gateways are sent its address."""
        settings = self._settings
        admin_port = self._peers.bind(self._admin_server, settings.host, settings.admin_port, option="--admin-port")
        self.admin_address = f"{settings.host}:{admin_port}"
        port = self._peers.bind(self._server, settings.host, settings.port, option="--port")
        self.address = f"{settings.host}:{port}"
        tls = self._peers.http_context(settings.host)
        self.metrics_address = self._metrics_server.start(settings.host, settings.metrics_port, tls)
        self._add_services()
        await self._health.start()
        await self._set_health()
        self._readiness.listen(self._on_readiness)
        self._readiness.listen(self._spans.readiness_changed)
        await self._admin_server.start()
        await self._server.start()

    def _add_services(self) -> None:
        engine = EngineServicer(
            self._gateways, self._values, self._readiness, self._kv_events, self._identity, self.admin_address
        )
        engine_pb2_grpc.add_EngineServiceServicer_to_server(engine, self._server)  # type: ignore[no-untyped-call]
        calls = AdapterCalls(self._adapters)
        admin = AdminParts(
            core=self._core,
            log=self._log,
            explanations=self._explanations,
            record_buffer=self._record_buffer,
            set_policy=self._loop.set_policy,
            drain_worker=self._loop.drain_worker,
            adapters=calls,
            load=LoadReport(self._settings, self._book, self._core, self._log, self._readiness, self._metrics.sums),
            roster=self._roster,
            readiness=self._readiness,
            book=self._book,
        )
        self._admin_server.add_generic_rpc_handlers((AdminService(admin).handler(),))
        for server, service in ((self._server, ENGINE_SERVICE), (self._admin_server, ADMIN_SERVICE)):
            health_pb2_grpc.add_HealthServicer_to_server(self._health.servicer, server)
            if self._settings.reflection:
                reflection.enable_server_reflection((service, HEALTH_SERVICE, reflection.SERVICE_NAME), server)

    def _on_readiness(self) -> None:
        self._health_task = asyncio.ensure_future(self._set_health())

    async def _set_health(self) -> None:
        await self._health.set(("", ENGINE_SERVICE), serving=self._readiness.is_open)

    async def run(self, stop: asyncio.Event) -> None:
        """Run steps until `stop`. Raises if the step loop ends with an error."""
        self._directory.start()
        loop = asyncio.create_task(self._loop.run(), name="step-loop")
        told = asyncio.create_task(self._metrics.stats_line.run(self._settings.stats_interval_s), name="stats")
        stopped = asyncio.create_task(stop.wait())
        try:
            await asyncio.wait({loop, stopped}, return_when=asyncio.FIRST_COMPLETED)
            if loop.done():
                loop.result()
            await self._health.drain()
        finally:
            for task in (stopped, told, loop):
                task.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await task

    async def stop(self) -> None:
        """Close gateway streams, drain the servers, release the workers, and flush telemetry."""
        self._gateways.close_all()
        self._kv_events.close()
        self._metrics_server.close()
        await asyncio.gather(self._server.stop(self._settings.drain_s), self._admin_server.stop(self._settings.drain_s))
        await self._directory.close()
        await asyncio.gather(*(lane.close() for lane in self._roster.lanes))
        if self._health_task is not None:
            await self._health_task
        self._telemetry.shutdown()
