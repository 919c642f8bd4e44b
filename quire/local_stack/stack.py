"""A local stack of gateway, scheduler and workers: start, wait until ready, restart, stop.

    with LocalStack(model="models/tiny") as stack:
        with Client(stack.grpc_address) as client:
            print(client.generate("import ").text)

Used by `quire up`, the demo, tests and benchmarks. Not here: what to start (`stack_options`), one child
process (`processes`), when it is restarted (`restarts`).
"""

import time
from collections.abc import Callable
from contextlib import ExitStack
from types import TracebackType
from typing import TYPE_CHECKING, Self

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from quire import extras
from quire.client.connections import Credentials, blocking_channel
from quire.local_stack import ports
from quire.local_stack.processes import LineSink, ServiceProcess, ignore_line
from quire.local_stack.restarts import Restarts
from quire.local_stack.stack_options import StackOptions
from quire.operators.admin import AdminClient
from svc_common.errors import ConfigError, DeadlineExceeded, QuireError, Unavailable
from svc_common.net.tls_settings import GATEWAY, SCHEDULER, WORKER

if TYPE_CHECKING:
    from quire.local_stack.worker_watch import WorkerWatch

POLL_S = 0.02
STOP_GRACE_S = 10.0


class LocalStack:
    """Owns a child process for each service. Context manager: entering starts them and waits until they can serve."""

    def __init__(
        self,
        options: StackOptions | None = None,
        *,
        start_timeout_s: float = 120.0,
        on_line: LineSink = ignore_line,
        on_service: Callable[[ServiceProcess], None] = lambda service: None,
        on_progress: Callable[[str, float], None] = lambda stage, fraction: None,
        on_restart: Callable[[str, float], None] = lambda death, pause_s: None,
        **changes: object,
    ) -> None:
        """`changes` are fields of StackOptions.

        Callbacks: `on_service` when a process has printed its address; `on_progress(stage, 0..1)` while the model loads (on a
        thread); `on_line` for lines that services write to standard error (on threads); `on_restart(summary of the death, pause
        before the restart)`, called by `revive`.
        """
        if options is not None and changes:
            raise TypeError("give either options or their fields, not both")
        self.options = options or StackOptions(**changes)  # type: ignore[arg-type]
        self._start_timeout_s = start_timeout_s
        self._on_line = on_line
        self._on_service = on_service
        self._on_progress = on_progress
        self._on_restart = on_restart
        self._watches: list[WorkerWatch] = []
        self._services: dict[str, ServiceProcess] = {}
        self._silent: dict[str, ServiceProcess] = {}
        self._restarts = Restarts(self.options.restart)
        self._ports: dict[str, int] = {}
        # Held as long as the stack runs, so that a restarted service can use the same port.
        self._reserved = ExitStack()

    # --- where it is ----------------------------------------------------------------------------------------------

    @property
    def grpc_address(self) -> str:
        """Address of the gateway's gRPC listener, HOST:PORT."""
        return self._address("--grpc-port")

    @property
    def http_url(self) -> str:
        """URL of the gateway's HTTP listener; the OpenAI base URL is this with `/v1`."""
        return f"{'http' if self.options.tls is None else 'https'}://{self._address('--http-port')}"

    @property
    def credentials(self) -> Credentials:
        """Credentials for clients of this stack, with the client certificate if there is one; without API key."""
        certificates = self.options.certificates
        return Credentials() if certificates is None else certificates.credentials()

    @property
    def admin_address(self) -> str:
        """Address of AdminService as relayed by the gateway."""
        return self._address("--admin-port")

    @property
    def admin_url(self) -> str:
        """URL of the gateway's admin HTTP listener: the lab, and metrics under `/metrics`."""
        return f"{'http' if self.options.tls is None else 'https'}://{self._address('--admin-http-port')}"

    @property
    def scheduler_address(self) -> str:
        """Address of the scheduler's EngineService."""
        return self._address("scheduler --port")

    @property
    def worker_address(self) -> str:
        """Address of the first worker's WorkerService."""
        return self.worker_addresses[0]

    @property
    def worker_addresses(self) -> list[str]:
        """Address of each worker's WorkerService."""
        return [self._address(f"{name} --port") for name in self.options.worker_names]

    @property
    def metrics_addresses(self) -> dict[str, str]:
        """Address of /metrics of each worker and the scheduler, by service.

        The gateway serves its own at its HTTP listeners.
        """
        return {name: self._address(f"{name} --metrics-port") for name in ["scheduler", *self.options.worker_names]}

    @property
    def pids(self) -> dict[str, int]:
        """Process ids by service."""
        return {name: service.pid for name, service in self._services.items()}

    def _address(self, option: str) -> str:
        return f"{self.options.host}:{self._ports[option]}"

    # --- life -----------------------------------------------------------------------------------------------------

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.stop()

    def launch(self) -> None:
        """Start the processes without waiting for them, as `start` does first. Raises ConfigError for options that cannot work."""
        extras.require("starting the services", *extras.services(simulated=self.options.simulated))
        self.options.check()
        try:
            self._ports = self._reserved.enter_context(ports.reserved(self.options.host, self.options.wanted_ports))
            for name in self.options.commands(self._ports):
                self._start(name)
        except BaseException:
            self._stop(at_once=True)
            raise

    def start(self) -> None:
        """Start the services unless `launch` has, and return when the gateway is SERVING.

        Raises ConfigError or Unavailable if one ends before, DeadlineExceeded after the start timeout; all
        services are stopped then.
        """
        deadline = time.monotonic() + self._start_timeout_s
        if not self._services:
            self.launch()
        try:
            self._watch_workers()
            self._wait_announced(deadline)
            self._wait_serving(deadline)
            self._wait_workers(deadline)
            self._check_adapters()
            self._stop_watching()
        except BaseException:
            # Nothing is served yet, so all may stop at the same time, and a loading worker has the whole
            # grace period.
            self._stop(at_once=True)
            raise

    def _watch_workers(self) -> None:
        """Watch all workers; report only the first one's progress, since all load the same model at the same time."""
        # Imported here because it needs the policies; see StackOptions.choice.
        from quire.local_stack.worker_watch import WorkerWatch  # noqa: PLC0415

        choice = self.options.choice
        for number, address in enumerate(self.worker_addresses):
            on_progress = self._on_progress if number == 0 else lambda stage, fraction: None
            channel = self._inner_channel(address, as_role=SCHEDULER, to=WORKER)
            self._watches.append(WorkerWatch(channel, choice, on_progress))

    def _inner_channel(self, address: str, *, as_role: str, to: str) -> grpc.Channel:
        """A channel to a service behind the gateway, which accepts only services."""
        return blocking_channel(self._inner_credentials(as_role, to))(address)

    def _inner_credentials(self, as_role: str, to: str) -> Credentials:
        certificates = self.options.certificates
        return Credentials(api_key="") if certificates is None else certificates.credentials(as_role, expects=to)

    def _start(self, name: str) -> None:
        arguments = self.options.commands(self._ports)[name]
        service = ServiceProcess(name, arguments, environ=self.options.environ, on_line=self._on_line)
        self._services[name] = self._silent[name] = service
        self._restarts.started(name, time.monotonic())

    def revive(self) -> None:
        """Restart services that died, after a pause, at the same address with the same arguments; the others keep running.

        Does not block: call it about every 0.1 s. Raises ConfigError if a service ended because of a wrong
        setting, Unavailable after as many consecutive deaths as `options.restart` allows.
        """
        for name, service in self._services.items():
            death = None if self._restarts.is_waiting(name) else service.death()
            if death is not None:
                self._mourn(name, death)
        for name in self._restarts.due(time.monotonic()):
            self._services[name].wait(0)
            self._start(name)
        self._tell_announced()

    def _mourn(self, name: str, death: QuireError) -> None:
        """Schedule the restart of a dead service, or raise if it is given up."""
        if not isinstance(death, Unavailable):
            raise death
        pause_s = self._restarts.died(name, time.monotonic())
        if pause_s is None:
            rules = self.options.restart
            raise Unavailable(
                f"the {name} died {rules.max_deaths} times in a row, each time within {rules.steady_s:g} s of its start, and is "
                f"given up; the last time: {death.message}",
                reason="SERVICE_GIVEN_UP",
                metadata={"service": name, "deaths": str(rules.max_deaths)},
            )
        self._on_restart(death.metadata["summary"], pause_s)
        # A group of ranks starts anew as a whole: the others could not go on, and one may hang.
        for other in self.options.ranks_of(name):
            if other != name and not self._restarts.is_waiting(other):
                self._services[other].kill()

    def check(self) -> None:
        """Raise if a service has ended, or if a worker reported that it can never serve."""
        for service in self._services.values():
            service.check()
        for watch in self._watches:
            if watch.error is not None:
                raise watch.error

    def stop(self) -> None:
        """Stop gateway, scheduler and workers in this order; kill those that exceed the grace period. Idempotent."""
        self._stop(at_once=False)

    def stop_at_once(self) -> None:
        """Like `stop`, but all at the same time: faster, and for a stack without requests."""
        self._stop(at_once=True)

    def _stop(self, *, at_once: bool) -> None:
        self._stop_watching()
        running = [self._services[name] for name in self._stop_order if name in self._services]
        deadline = time.monotonic() + STOP_GRACE_S
        for service in running if at_once else ():
            service.terminate()
        for service in running:
            if not at_once:
                service.terminate()
            service.wait(max(0.1, deadline - time.monotonic()))
        self._services.clear()
        self._silent.clear()
        self._reserved.close()

    def kill(self) -> None:
        """Kill all services; `stop` then has nothing to wait for."""
        for service in self._services.values():
            service.kill()

    @property
    def _stop_order(self) -> list[str]:
        workers = [rank for name in self.options.worker_names for rank in self.options.ranks_of(name)]
        return ["gateway", "scheduler", *workers]

    def _stop_watching(self) -> None:
        for watch in self._watches:
            watch.close()
        self._watches.clear()

    def _wait_announced(self, deadline: float) -> None:
        while self._silent:
            self.check()
            self._tell_announced()
            self._sleep(deadline, "say where it listens")

    def _tell_announced(self) -> None:
        for name in [name for name, service in self._silent.items() if service.announced and service.address]:
            self._on_service(self._silent.pop(name))

    def _wait_serving(self, deadline: float) -> None:
        with blocking_channel(self.credentials)(self.grpc_address) as channel:
            health = health_pb2_grpc.HealthStub(channel)
            while not _is_serving(health):
                self.check()
                self._sleep(deadline, "get ready")

    def _scheduler_admin(self) -> AdminClient:
        """A client of the scheduler itself, as the gateway may require a key."""
        address, inner = self._address("scheduler --admin-port"), self._inner_credentials(GATEWAY, SCHEDULER)
        return AdminClient(address, credentials=inner)

    def _wait_workers(self, deadline: float) -> None:
        """Wait for the workers that are not needed to serve, but wanted."""
        if self.options.workers == 1:
            return
        with self._scheduler_admin() as admin:
            while not all(worker.ready for worker in admin.workers()):
                self.check()
                self._sleep(deadline, "get ready")

    def _check_adapters(self) -> None:
        """Raise ConfigError if a worker could not load one of the adapters given at startup."""
        if not self.options.adapters:
            return
        with self._scheduler_admin() as admin:
            for adapter in admin.list_adapters():
                if adapter.unavailable:
                    raise ConfigError(
                        f"--adapter {adapter.name}={adapter.path}: {adapter.unavailable}",
                        reason="ADAPTER_UNAVAILABLE",
                        metadata={"adapter": adapter.name, "path": adapter.path},
                    )

    def _sleep(self, deadline: float, what: str) -> None:
        if time.monotonic() > deadline:
            raise DeadlineExceeded(
                f"the services did not {what} within {self._start_timeout_s:g} s", reason="START_TIMEOUT"
            )
        time.sleep(POLL_S)


def _is_serving(health: health_pb2_grpc.HealthStub) -> bool:
    try:
        answer = health.Check(health_pb2.HealthCheckRequest(), timeout=2)
    except grpc.RpcError:
        return False
    return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)
