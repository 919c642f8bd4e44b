"""Workers of tests are forks of a process that has imported torch; to a test they are processes as any other."""

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from quire.local_stack.processes import ServiceProcess, ignore_line
from tests.support import warm_starts


@contextmanager
def worker(**variables: str) -> Iterator[ServiceProcess]:
    """One that runs, with these variables in its environment."""
    arguments = ["worker", "--model", "models/tiny", "--port", "0", "--metrics-port", "0"]
    service = ServiceProcess("worker", arguments, environ=os.environ | variables, on_line=ignore_line)
    try:
        yield service
    finally:
        service.kill()
        service.wait(10)


def ends_by_signal(service: ServiceProcess) -> bool:
    service.kill()
    assert service.wait(10) == -signal.SIGKILL
    return "was killed by signal 9" in str(service.death())


def ends_in_order(service: ServiceProcess) -> bool:
    service.terminate()
    return service.wait(30) == 0


@pytest.mark.skipif(
    not warm_starts.is_installed(), reason="forks beside their parent are for Linux on x86-64 and aarch64"
)
@pytest.mark.parametrize("ends", [ends_by_signal, ends_in_order])
def test_a_worker_is_a_fork(ends: Callable[[ServiceProcess], bool]) -> None:
    """It is a child of this process, with variables, working directory and exit status of its own."""
    with worker(QUIRE_TEST_WARM="1") as service:
        while not service.address and service.death() is None:
            pass
        found = psutil.Process(service.pid)
        assert "tests.support.warm_starts" in found.cmdline()
        assert found.ppid() == os.getpid()
        assert found.cwd() == str(Path.cwd())
        assert os.getpgid(service.pid) == service.pid
        assert ends(service)


def test_what_libraries_read_when_they_are_imported() -> None:
    """A worker with such a variable starts as a user's."""
    with worker(HF_HUB_OFFLINE="1") as service:
        assert "serve" in psutil.Process(service.pid).cmdline()
