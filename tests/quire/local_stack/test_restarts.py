"""Starting dead services again: how long it pauses and when it gives up."""

import inspect
import os
import signal
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from gateway_svc.engine import scheduler_link
from quire.cli.serving.up import CHECK_S
from quire.local_stack.processes import ServiceProcess
from quire.local_stack.restarts import RestartRules, Restarts
from quire.local_stack.stack import LocalStack
from quire.local_stack.stack_options import StackOptions
from scheduler_svc.settings import SchedulerSettings
from svc_common.errors import ConfigError, Unavailable
from svc_common.net import rpc
from svc_common.net.peers import Peers
from tests.support.stack.kill_plan import Killer
from tests.support.stack.kill_signs import LOADING
from tests.support.stack.up_process import wait_gone

QUICK = RestartRules(max_deaths=3, first_pause_s=0.05)


def test_pauses_grow_from_death_to_death_and_end_after_so_many() -> None:
    """They double up to the longest one; the death that is one too many has no pause."""
    restarts, now_s = Restarts(RestartRules(max_deaths=6, first_pause_s=0.5, longest_pause_s=3.0)), 100.0
    pauses = []
    for _ in range(6):
        restarts.started("worker", now_s)
        now_s += 1.0
        pauses.append(restarts.died("worker", now_s))
        now_s += 3.0
    assert pauses == [0.5, 1.0, 2.0, 3.0, 3.0, None]


def test_a_steady_life_clears_the_account_and_each_service_has_its_own() -> None:
    """Only deaths in a row count."""
    restarts = Restarts(RestartRules(max_deaths=3, steady_s=60.0, first_pause_s=0.1))
    for name in ("worker", "gateway"):
        restarts.started(name, 0.0)
    assert [restarts.died("worker", 1.0), restarts.died("gateway", 1.0)] == [0.1, 0.1]
    assert restarts.is_waiting("worker") and restarts.due(1.05) == [] and restarts.due(1.1) == ["worker", "gateway"]
    restarts.started("worker", 2.0)
    assert not restarts.is_waiting("worker") and restarts.due(2.0) == ["gateway"]
    assert restarts.died("worker", 61.9) == 0.2
    restarts.started("worker", 63.0)
    assert restarts.died("worker", 123.0) == 0.1


def test_what_a_restarted_scheduler_is_waited_for_is_little() -> None:
    """However often it died: seen, paused for, found again by its gateway, and its worker taken without waiting for a lease.

    Three seconds are promised for all of it; what is left is for the start of the process.
    """
    rules = RestartRules()
    assert CHECK_S + rules.longest_pause_s + scheduler_link.MAX_BACKOFF_S <= 1.5
    options = StackOptions(simulated=True)
    assert "--force-ownership" in options.commands(dict.fromkeys(options.wanted_ports, 1))["scheduler"]


def test_a_stopped_service_is_noticed_within_two_and_a_half_seconds() -> None:
    """A channel between services pings after so long without a byte, and waits so long for the answer: of every channel."""
    assert 2 * rpc.KEEPALIVE_S <= 2.0
    assert "keepalive_s" not in inspect.signature(Peers.channel).parameters


def test_a_poison_request_is_found_out_before_its_workers_are_given_up() -> None:
    """The scheduler fails a request alone after so many deaths in a row; with fewer restarts it would take all others with it."""
    assert RestartRules().max_deaths > SchedulerSettings().max_worker_losses


@contextmanager
def stack(deaths: list[str]) -> Iterator[LocalStack]:
    """Simulated, quick to give up; nothing of it stays. What died goes into `deaths`."""
    with LocalStack(simulated=True, restart=QUICK, on_restart=lambda death, pause_s: deaths.append(death)) as running:
        yield running
        pids = list(running.pids.values())
    assert wait_gone(pids, timeout_s=1) == []


def revive_until(running: LocalStack, pid: int) -> None:
    """Until another process than `pid` is the worker."""
    deadline = time.monotonic() + 30
    while running.pids["worker"] == pid:
        running.revive()
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_service_that_dies_again_and_again_is_given_up() -> None:
    """The error says which one, how often, and how the last one ended; asked by `check`, the first death is an error."""
    deaths: list[str] = []
    with stack(deaths) as running:
        for _ in range(2):
            pid = running.pids["worker"]
            os.kill(pid, signal.SIGKILL)
            revive_until(running, pid)
        os.kill(running.pids["worker"], signal.SIGKILL)
        with pytest.raises(Unavailable, match=r"worker \(pid \d+\) was killed by signal 9"):
            while True:
                running.check()
        with pytest.raises(Unavailable, match=r"the worker died 3 times in a row.*was killed by signal 9") as caught:
            running.revive()
    assert len(deaths) == 2 and all("was killed by signal 9" in death for death in deaths)
    assert (caught.value.reason, caught.value.metadata["service"]) == ("SERVICE_GIVEN_UP", "worker")


def test_a_wrong_setting_is_given_up_at_once() -> None:
    """What a restart cannot repair: here another process took the port meanwhile."""
    deaths: list[str] = []
    with stack(deaths) as running, socket.socket() as thief:
        host, _, port = running.worker_address.rpartition(":")
        pid = running.pids["worker"]
        os.kill(pid, signal.SIGKILL)
        while not deaths:
            running.revive()
        thief.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        thief.bind((host, int(port)))
        thief.listen()
        revive_until(running, pid)
        with pytest.raises(ConfigError, match=f"port {port} on {host} is in use"):
            revive_until(running, running.pids["worker"])


@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.long)])
def test_a_worker_that_is_loading_ends_when_it_is_asked_to(number: int, tmp_path: Path) -> None:
    """Its load goes on in threads that nothing can interrupt: the process leaves them, ends well, and is not killed."""
    killer, said = Killer(tmp_path), []
    killer.arm(LOADING)
    service = ServiceProcess(
        "worker",
        ["simulated-worker", "--port", "0", "--metrics-port", "0"],
        environ=killer.environ,
        on_line=lambda name, line: said.append(line),
    )
    try:
        while not killer.hits:
            service.check()
            time.sleep(0.01)
        os.kill(service.pid, number)
        assert service.wait(30) == 0, said
    finally:
        service.kill()
        service.wait(1)
    assert not any("killed" in line or "terminate called" in line for line in said)


def test_a_service_held_by_sigstop_hears_that_it_should_stop() -> None:
    """Else the end of everything would wait until it is killed."""
    said: list[str] = []
    service = ServiceProcess(
        "worker",
        ["simulated-worker", "--port", "0", "--metrics-port", "0"],
        environ=os.environ,
        on_line=lambda name, line: said.append(line),
    )
    try:
        while not service.announced:
            time.sleep(0.01)
        service.check()
        os.kill(service.pid, signal.SIGSTOP)
        service.terminate()
        assert service.wait(10) == 0
    finally:
        service.kill()
        service.wait(1)
    assert not any("killed" in line for line in said)
