"""Composition root of a gateway: builds every part, listens, and stops in order.

Stopping: health NOT_SERVING; refuse new requests; give running ones `drain_s`; say goodbye to the schedulers,
which cancel the rest; stop the servers.

Several schedulers serve several models. What is about one model (load and metrics for routers, KV events, stored
responses, admin API) is about that of the first.
"""

import asyncio
import contextlib
import logging
from collections.abc import Callable
from typing import Any

import grpc
import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection
from starlette.types import ASGIApp

from gateway_svc import admin_relay, grpc_poller_priority, inference_service
from gateway_svc.access import grpc_guard
from gateway_svc.access.grpc_guard import GrpcGuard
from gateway_svc.access.http_guard import HttpGuard
from gateway_svc.access.listeners import Listeners
from gateway_svc.access.origins import with_origins
from gateway_svc.access.tenant_callers import TenantCallers
from gateway_svc.admin_relay import AdminRelay
from gateway_svc.calls import Callers, CallIntake, DefaultTenantOnly
from gateway_svc.cell.cell import Cell
from gateway_svc.cell.exposition import Exposition
from gateway_svc.cell.kv_publisher import KvEndpoints, KvPublisher
from gateway_svc.cell.load_routes import LoadRoutes
from gateway_svc.cell.router_headers import FairnessCallers, read_goals
from gateway_svc.chat.tool_calls.format_choice import FormatChoice
from gateway_svc.engine_calls import EngineCalls, EngineParts, ReadMetadata
from gateway_svc.generating.embedder import Embedder
from gateway_svc.generating.generator import Generator
from gateway_svc.generating.model_catalog import ModelCatalog
from gateway_svc.http.server import HttpServer
from gateway_svc.http_app import http_app
from gateway_svc.inference_service import InferenceService
from gateway_svc.lab.app import lab_app
from gateway_svc.lab.guard import LabGuard
from gateway_svc.lab.live import LiveLabSource
from gateway_svc.metrics import GatewayMetrics
from gateway_svc.openai.scoring.scorers import LabelScorer, Scorer, VectorScorer
from gateway_svc.openengine import control_contract, inference_contract
from gateway_svc.openengine.control_contract import GatewayView, OpenEngineControl
from gateway_svc.openengine.inference_contract import OpenEngineInference
from gateway_svc.openengine.routing_metadata import with_routing
from gateway_svc.settings import GatewaySettings
from gateway_svc.smg import engine_service
from gateway_svc.smg.engine_service import VllmEngineService
from gateway_svc.spans import CallSpans
from svc_common.errors import ConfigError, QuireError
from svc_common.net import rpc
from svc_common.net.health import ServiceHealth
from svc_common.net.malformed import MalformedRefused
from svc_common.net.peers import Peers
from svc_common.net.tls import is_loopback
from svc_common.observability import telemetry
from svc_common.signals import on_hangup, stop_on_signals
from svc_common.tenant_load import TenantLoad

log = logging.getLogger(__name__)

STOP_GRACE_S = 1.0
DRAIN_POLL_S = 0.02

OnReady = Callable[[str, str, str, str], None]

_HEALTH_NAME = health_pb2.DESCRIPTOR.services_by_name["Health"].full_name
_PUBLIC_NAMES = (inference_service.SERVICE_NAME, engine_service.SERVICE_NAME)
_OPENENGINE_NAMES = (inference_contract.SERVICE_NAME, control_contract.SERVICE_NAME)


async def serve(settings: GatewaySettings, *, on_ready: OnReady, stop: asyncio.Event | None = None) -> None:
    """Run a gateway until SIGTERM, SIGINT or `stop`.

    `on_ready(grpc, http, admin, admin_http)` gets the addresses HOST:PORT as soon as it listens; the
    scheduler may start later. Raises ConfigError naming the option if a port is taken.
    """
    stop = stop or asyncio.Event()
    gateway = _Gateway(settings)
    try:
        addresses = await gateway.start()
        with stop_on_signals(stop), on_hangup(gateway.reload):
            on_ready(*addresses)
            await gateway.run_until(stop)
    finally:
        await gateway.stop()


def _callers(settings: GatewaySettings) -> Callers:
    callers = _own_callers(settings)
    return FairnessCallers(callers, has_file=settings.tenants is not None) if settings.router_headers else callers


def _intake(settings: GatewaySettings, callers: Callers) -> CallIntake:
    if not settings.router_headers:
        return CallIntake(settings, callers)
    priorities = settings.priorities
    return CallIntake(settings, callers, lambda metadata: read_goals(metadata, priorities))


def _own_callers(settings: GatewaySettings) -> Callers:
    if settings.tenants is not None:
        return TenantCallers(settings.tenants)
    if not is_loopback(settings.host):
        log.warning(
            "no --tenants: every client that reaches %s may call everything, including the admin API",
            settings.host,
        )
    return DefaultTenantOnly()


class _Gateway:
    """All parts of one gateway process."""

    def __init__(self, settings: GatewaySettings) -> None:
        self._settings = settings
        self._tracing = telemetry.setup("gateway", max_forced_per_s=settings.max_forced_traces)
        self._spans = CallSpans(self._tracing, with_content=settings.trace_content)
        self._doors, self._peers = Listeners(settings.doors), Peers(settings.peers)
        self._callers = _callers(settings)
        live = TenantLoad()
        self._cells = [Cell(settings, address, self._peers, self._tracing, live) for address in settings.schedulers]
        first = self._cells[0]
        self._catalog = ModelCatalog([cell.model for cell in self._cells], settings.model_aliases)
        self._metrics = GatewayMetrics(self._tracing)
        self._metrics.watch([cell.link for cell in self._cells])
        formats = FormatChoice(settings.tool_parser, settings.reasoning_parser)
        self._generator = Generator(self._catalog, self._spans, self._metrics, formats)
        self._embedder = Embedder(self._catalog, self._spans, self._metrics)
        self._intake = _intake(settings, self._callers)
        self._relay = AdminRelay(first.admin.connected, first.model.until_known)
        self._exposition = Exposition(self._metrics, first.load, lambda: first.link.state, settings.metrics_names)
        self._health = ServiceHealth()
        self._health_changed = asyncio.Event()
        self._server = self._public_server()
        self._admin = self._admin_server()
        app = http_app(
            self._generator,
            self._embedder,
            self._catalog,
            first.values,
            self._catalog.cancel,
            self._intake,
            self._spans,
            self._not_ready_because,
            self._metrics,
            self._scorer(),
            self._exposition,
            LoadRoutes(first.load, lambda: first.link.state),
            shows_tokenizer=settings.enable_tokenizer_info_endpoint,
        )
        door = HttpGuard(app, self._callers)
        self._http = self._http_server(with_origins(door, settings.allowed_origins))
        self._admin_http = self._http_server(self._lab(door))
        self._kv_publisher = self._new_kv_publisher()
        self._tasks: list[asyncio.Task[None]] = []
        self._http_tasks: list[asyncio.Task[None]] = []
        self._stopping = False
        for cell in self._cells:
            cell.watch(self._health_changed.set)

    def _scorer(self) -> Scorer:
        path = self._settings.score_template
        if path is None:
            return VectorScorer(self._embedder)
        try:
            labels = [label for label in self._settings.score_tokens.split(",") if label]
            return LabelScorer(self._generator, self._catalog, path.read_text(encoding="utf-8"), labels)
        except (OSError, UnicodeDecodeError, QuireError) as error:
            raise ConfigError(f"--score-template: {path} cannot be used: {error}", reason="SCORE_TEMPLATE") from None

    def _public_server(self) -> grpc.aio.Server:
        server = rpc.server(public=True, interceptors=(self._guard(grpc_guard.enter), MalformedRefused()))
        service = InferenceService(
            self._generator,
            self._embedder,
            self._catalog,
            self._catalog.cancel,
            self._intake,
            self._spans,
            self._metrics,
        )
        engine = VllmEngineService(self._engine_parts()).handler(self._engine_calls(engine_service.SERVICE_NAME))
        server.add_generic_rpc_handlers((service.handler(), engine, *self._openengine_handlers()))
        self._add_standard_services(server, *self._public_names)
        return server

    @property
    def _public_names(self) -> tuple[str, ...]:
        """Services of the clients' listener."""
        return (*_PUBLIC_NAMES, *_OPENENGINE_NAMES) if self._settings.openengine else _PUBLIC_NAMES

    def _openengine_handlers(self) -> "list[grpc.GenericRpcHandler[Any, Any]]":
        if not self._settings.openengine:
            return []
        view = GatewayView(
            self._cells,
            lambda: self._stopping,
            lambda: self._spans.grpc_at or (self._settings.host, 0),
            lambda: None if self._kv_publisher is None else self._kv_publisher.at,
        )
        parts = self._engine_parts()
        routed = self._engine_calls(inference_contract.SERVICE_NAME, with_routing)
        return [
            OpenEngineInference(parts).handler(routed),
            OpenEngineControl(parts, view).handler(self._engine_calls(control_contract.SERVICE_NAME)),
        ]

    def _engine_calls(self, service: str, *read_metadata: ReadMetadata) -> EngineCalls:
        return EngineCalls(service, self._intake, self._spans, self._metrics, *read_metadata)

    def _engine_parts(self) -> EngineParts:
        first = self._cells[0]
        return EngineParts(
            self._generator,
            self._embedder,
            self._catalog,
            first.load,
            self._catalog.cancel,
            first.link.fetch_bundle,
            first.link.kv_events,
            self._not_ready_because,
        )

    def _new_kv_publisher(self) -> KvPublisher | None:
        settings = self._settings
        if not settings.kv_events_endpoint:
            return None
        topic = settings.kv_events_topic
        endpoints = KvEndpoints(settings.kv_events_endpoint, settings.kv_events_replay_endpoint, topic)
        return KvPublisher(endpoints, self._cells[0].link.kv_events)

    def _admin_server(self) -> grpc.aio.Server:
        server = rpc.server(interceptors=(self._guard(grpc_guard.enter_as_admin), MalformedRefused()))
        server.add_generic_rpc_handlers((self._relay.handler(),))
        self._add_standard_services(server, admin_relay.SERVICE_NAME)
        return server

    def _http_server(self, app: ASGIApp) -> HttpServer:
        return HttpServer(app, STOP_GRACE_S, self._doors.http_context(), self._settings.http_limits)

    def _lab(self, door: HttpGuard) -> LabGuard:
        """Build the admin HTTP listener's application; its playground uses the users' API (`door`)."""
        first = self._cells[0]
        source = LiveLabSource(first.admin.connected, title=f"scheduler {first.scheduler}", can_generate=True)
        app = lab_app(source, play=door, measured=self._exposition.text)
        return LabGuard(app, self._callers, self._settings.admin_http_names)

    def _guard(self, check: grpc_guard.Check) -> GrpcGuard:
        return GrpcGuard(self._callers, check, open_reflection=self._settings.reflection)

    def _add_standard_services(self, server: grpc.aio.Server, *names: str) -> None:
        health_pb2_grpc.add_HealthServicer_to_server(self._health.servicer, server)
        if self._settings.reflection:
            reflection.enable_server_reflection((*names, _HEALTH_NAME, reflection.SERVICE_NAME), server)

    # --- health ------------------------------------------------------------------------------------------------------

    def _not_ready_because(self) -> str:
        """Why no model can be used; empty if one can."""
        if self._stopping:
            return "this gateway is stopping"
        reasons = [cell.not_ready_because for cell in self._cells]
        return "; ".join(reasons) if all(reasons) else ""

    async def _follow_health(self) -> None:
        while True:
            await self._health_changed.wait()
            self._health_changed.clear()
            await self._set_health(serving=not self._not_ready_because())

    async def _set_health(self, *, serving: bool) -> None:
        """Set the health of the gateway, of its services, and of each served model and adapter by name."""
        served = self._catalog.served
        away = [cell.model for cell in self._cells if cell.not_ready_because]
        absent = {model.name for model in served if model.cell in away}
        names = {"", *self._public_names, admin_relay.SERVICE_NAME, *(model.name for model in served)}
        await self._health.set(names, serving=serving, absent=absent)

    # --- start and stop ----------------------------------------------------------------------------------------------

    async def start(self) -> tuple[str, str, str, str]:
        """Bind all ports, then serve. Returns the addresses of gRPC, HTTP, admin and admin HTTP."""
        settings = self._settings
        self._doors.check(settings.host)
        await self._health.start()
        await self._set_health(serving=False)
        grpc_port = self._doors.bind(self._server, settings.host, settings.grpc_port, option="--grpc-port")
        self._spans.grpc_at = settings.host, grpc_port
        admin_port = self._doors.bind(self._admin, settings.host, settings.admin_port, option="--admin-port")
        http_port = self._http.bind(settings.host, settings.http_port, option="--http-port")
        admin_http_port = self._admin_http.bind(settings.host, settings.admin_http_port, option="--admin-http-port")
        await self._server.start()
        await self._admin.start()
        grpc_poller_priority.wait_its_turn()
        work = [part for cell in self._cells for part in cell.start()]
        work += [self._follow_health(), self._callers.run()]
        if self._kv_publisher is not None:
            work.append(self._kv_publisher.run())
        self._tasks = [asyncio.create_task(coroutine) for coroutine in work]
        self._http_tasks = [asyncio.create_task(server.run_bound()) for server in (self._http, self._admin_http)]
        return (
            *(f"{settings.host}:{grpc_port}", f"{settings.host}:{http_port}"),
            *(f"{settings.host}:{admin_port}", f"{settings.host}:{admin_http_port}"),
        )

    def reload(self) -> None:
        """Reload keys and quotas from the tenants file."""
        self._callers.reload()

    async def run_until(self, stop: asyncio.Event) -> None:
        """Wait for `stop`; raises if a part of the gateway dies, which is a bug."""
        stopped = asyncio.create_task(stop.wait())
        try:
            done, _ = await asyncio.wait(
                (stopped, *self._tasks, *self._http_tasks), return_when=asyncio.FIRST_COMPLETED
            )
            for task in done:
                task.result()
        finally:
            stopped.cancel()

    async def stop(self) -> None:
        """Stop in the order of the module docstring. Works from any half-started state."""
        self._stopping = True
        await self._health.drain()
        for cell in self._cells:
            cell.link.close()
        await self._drain()
        if self._tasks:
            await asyncio.gather(*(cell.link.leave() for cell in self._cells))
        self._http.stop()
        self._admin_http.stop()
        for cell in self._cells:
            await cell.admin.close()  # relayed streams, such as those of an open page, would not end by themselves
        await asyncio.gather(self._server.stop(STOP_GRACE_S), self._admin.stop(0))
        await self._end_tasks()
        if self._kv_publisher is not None:
            self._kv_publisher.close()
        for cell in self._cells:
            await cell.close()
        self._http.close()
        self._admin_http.close()
        await asyncio.to_thread(self._tracing.shutdown)

    async def _drain(self) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._settings.drain_s):
                while any(len(cell.link.requests) and cell.link.state.attached for cell in self._cells):
                    await asyncio.sleep(DRAIN_POLL_S)

    async def _end_tasks(self) -> None:
        """End all tasks: uvicorn ends by itself within its grace time, the others are cancelled."""
        for task in self._tasks:
            task.cancel()
        if self._http_tasks:
            await asyncio.wait(self._http_tasks, timeout=STOP_GRACE_S + 1)
        for task in self._http_tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, *self._http_tasks, return_exceptions=True)
