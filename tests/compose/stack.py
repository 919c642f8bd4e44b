"""One docker-compose.yml, up in one of its profiles: what the checks ask of it and do to it."""

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.support.commands import Failure, run
from tests.support.debian import program

GRPC, ADMIN, HTTP = "127.0.0.1:50051", "127.0.0.1:50052", "http://127.0.0.1:8000"
LAB, JAEGER = "http://127.0.0.1:8001", "http://127.0.0.1:16686"
PROMETHEUS, GRAFANA = "http://127.0.0.1:9090", "http://127.0.0.1:3000"
UP_S = 180
_COMPOSE_FILE = "docker-compose.yml"


@dataclass(frozen=True)
class Setup:
    """What is started: a profile, further files, variables. `profile` empty: the one of .env, as for a plain `up`."""

    profile: str = ""
    files: tuple[str, ...] = ()
    environ: Mapping[str, str] = field(default_factory=dict)


class Stack:
    """The containers of a `Setup`. The engine is the one that DOCKER_HOST names."""

    def __init__(self, setup: Setup) -> None:
        self.setup = setup
        self._containers: dict[str, str] = {}

    # --- up and down -------------------------------------------------------------------------------------------------

    def up(self) -> float:
        """Seconds until all are healthy. `Failure` with the logs of those that are not."""
        began_s = time.monotonic()
        try:
            self.compose("up", "--detach", "--wait", "--wait-timeout", str(UP_S))
        except Failure as error:
            raise Failure(f"{error}\n{self.compose('ps', '--all')}\n{self.compose('logs', '--tail', '40')}") from None
        return time.monotonic() - began_s

    def down(self) -> float:
        """Seconds until nothing of any profile is there, volumes included."""
        began_s = time.monotonic()
        docker("compose", "--profile", "*", "down", "--volumes", "--remove-orphans", environ=self.setup.environ)
        return time.monotonic() - began_s

    def compose(self, *words: str) -> str:
        """Output of `docker compose ...` with this setup's files and profile."""
        files = [word for file in (_COMPOSE_FILE, *self.setup.files) for word in ("--file", file)]
        profile = ["--profile", self.setup.profile] if self.setup.profile else []
        return docker("compose", *files, *profile, *words, environ=self.setup.environ)

    # --- looking -----------------------------------------------------------------------------------------------------

    def services(self) -> list[str]:
        """Names of those that run."""
        return sorted(self.compose("ps", "--services").split())

    def container(self, service: str) -> str:
        """Its container's id; the same after a restart."""
        if service not in self._containers:
            self._containers[service] = self.compose("ps", "--all", "--quiet", service).strip()
        return self._containers[service]

    def inspect(self, service: str) -> dict[str, Any]:
        """All that the engine knows of its container."""
        found: list[dict[str, Any]] = json.loads(docker("inspect", self.container(service)))
        return found[0]

    def pid(self, service: str) -> int:
        """Of its first process, as this machine sees it."""
        return int(self.inspect(service)["State"]["Pid"])

    def python(self, service: str, code: str) -> subprocess.CompletedProcess[str]:
        """Runs Python in the container, as its own user."""
        words = [program("docker"), "exec", self.container(service), "python", "-c", code]
        return subprocess.run(words, capture_output=True, text=True, timeout=60, check=False)

    def is_healthy(self, service: str) -> bool:
        """Whether its health check passes and it runs."""
        state = self.inspect(service)["State"]
        return bool(state["Running"]) and state.get("Health", {"Status": "healthy"})["Status"] == "healthy"

    # --- hurting -----------------------------------------------------------------------------------------------------

    def kill(self, service: str) -> None:
        """SIGKILL from outside: to the engine it died by itself, so the restart policy acts (after `docker kill` it would not)."""
        os.kill(self.pid(service), signal.SIGKILL)

    @contextmanager
    def paused(self, service: str) -> Iterator[None]:
        """Frozen: alive, connected, silent."""
        docker("pause", self.container(service))
        try:
            yield
        finally:
            docker("unpause", self.container(service))

    @contextmanager
    def disconnected(self, service: str, network: str) -> Iterator[None]:
        """Without that network, as if its cable were out."""
        container, name = self.container(service), f"quire_{network}"
        docker("network", "disconnect", name, container)
        try:
            yield
        finally:
            docker("network", "connect", "--alias", service, name, container)


def docker(*words: str | Path, environ: Mapping[str, str] | None = None) -> str:
    """Output of `docker ...`."""
    return run(program("docker"), *words, environ=environ)


def until(holds: Callable[[], Any], what: str, timeout_s: float = 30.0, pause_s: float = 0.2) -> Any:
    """What `holds` says as soon as it is true; `Failure` naming `what` after `timeout_s`."""
    until_s = time.monotonic() + timeout_s
    while not (value := holds()):
        if time.monotonic() > until_s:
            raise Failure(f"not within {timeout_s:g} s: {what}")
        time.sleep(pause_s)
    return value
