"""A cell of the last release behind Envoy, whose services are replaced by this release's, one by one, under load."""

import time
from contextlib import ExitStack
from pathlib import Path

from quire.local_stack.ports import reserved
from tests.cells.envoy_rig import NUM_CELLS, OPTIONS, PAUSE_S, Rig, behind_envoy, cell_on, none_fails
from tests.install.environment import Environment
from tests.install.upgrade import Services, installed, old_wheel
from tests.support.commands import Progress
from tests.support.network_hosts import NetworkHost, network_hosts
from tests.support.routers.inference_gateway import INTERVAL_S

_SERVICES = ("worker", "scheduler", "gateway")


def replace_all(rig: Rig, services: Services, host: NetworkHost, new: Environment) -> None:
    """Worker and scheduler in place; the gateway leaves the pool, and comes back."""
    endpoint = services.address("http")
    for name in ("worker", "scheduler"):
        _replace(services, name, host, new)
        time.sleep(INTERVAL_S)
        rig.picker.wait_ready(endpoint)
    rig.picker.want(rig.without(endpoint))
    time.sleep(PAUSE_S)
    _replace(services, "gateway", host, new)
    rig.picker.want(rig.endpoints)
    rig.picker.wait_ready(endpoint)


def _replace(services: Services, name: str, host: NetworkHost, new: Environment) -> None:
    services.stop(name)
    with host.entered():
        services.start(name, new)
    services.wait_serving(name)


def check(wheel: Path, old: Path | None, revision: str | None, home: Path, progress: Progress) -> None:
    """From `old`, or the wheel of `revision` (default: the latest tag, else the parent commit), to `wheel`: no request fails."""
    with ExitStack() as held:
        found = held.enter_context(old_wheel(old, revision, progress))
        before = installed(Environment(found.resolve(), home / "old"), progress)
        after = installed(Environment(wheel.resolve(), home / "new"), progress)
        steady, upgraded = held.enter_context(network_hosts(NUM_CELLS))
        with upgraded.entered():
            ports = held.enter_context(reserved(upgraded.address, dict.fromkeys((*_SERVICES, "http"), 0)))
            options = {kind: (*words, "--insecure") for kind, words in OPTIONS.items()}
            services = Services(ports, home, upgraded.address, options)
            held.callback(services.close)
            for name in _SERVICES:
                services.start(name, before)
        for name in _SERVICES:
            services.wait_serving(name)
        cell = held.enter_context(cell_on(steady))
        rig = held.enter_context(behind_envoy(home, [cell], [services.address("http")]))
        progress.say(none_fails(rig, "upgrade", lambda: replace_all(rig, services, upgraded, after)))
