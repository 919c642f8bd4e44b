"""A cell of the last release behind Envoy, whose services are replaced by this release's, one by one, under load."""

import time
from contextlib import ExitStack
from pathlib import Path

from quire.local_stack.ports import reserved
from tests.cells.envoy_rig import HOSTS, OPTIONS, PAUSE_S, Rig, behind_envoy, cell_at, none_fails
from tests.install.environment import Environment
from tests.install.upgrade import Services, installed, old_wheel
from tests.support.commands import Progress
from tests.support.routers.inference_gateway import INTERVAL_S

_SERVICES = ("worker", "scheduler", "gateway")


def replace_all(rig: Rig, services: Services, endpoint: str, new: Environment) -> None:
    """Worker and scheduler in place; the gateway leaves the pool, and comes back."""
    for name in ("worker", "scheduler"):
        _replace(services, name, new)
        time.sleep(INTERVAL_S)
        rig.picker.wait_ready(endpoint)
    rig.picker.want(rig.without(endpoint))
    time.sleep(PAUSE_S)
    _replace(services, "gateway", new)
    rig.picker.want(rig.endpoints)
    rig.picker.wait_ready(endpoint)


def _replace(services: Services, name: str, new: Environment) -> None:
    services.stop(name)
    services.start(name, new)
    services.wait_serving(name)


def check(wheel: Path, old: Path | None, revision: str | None, home: Path, progress: Progress) -> None:
    """From `old`, or the wheel of `revision` (default: the latest tag, else the parent commit), to `wheel`: no request fails."""
    steady, upgraded = HOSTS
    with ExitStack() as held:
        found = held.enter_context(old_wheel(old, revision, progress))
        before = installed(Environment(found.resolve(), home / "old"), progress)
        after = installed(Environment(wheel.resolve(), home / "new"), progress)
        ports = held.enter_context(reserved(upgraded, dict.fromkeys((*_SERVICES, "http"), 0)))
        services = Services(ports, home, upgraded, OPTIONS)
        held.callback(services.close)
        for name in _SERVICES:
            services.start(name, before)
        for name in _SERVICES:
            services.wait_serving(name)
        cell = held.enter_context(cell_at(steady))
        endpoint = services.address("http")
        rig = held.enter_context(behind_envoy(home, [cell], [endpoint]))
        progress.say(none_fails(rig, "upgrade", lambda: replace_all(rig, services, endpoint, after)))
