"""Fixtures for every test of the project. What only one package's tests need lives beside them."""

import gc
import signal
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, settings

import worker_svc.openmp  # noqa: F401  (before torch, here and in every process that tests start)
from quire.local_stack.otlp_receiver import OtlpReceiver
from svc_common import garbage
from tests.support import warm_starts

garbage.collect_rarely()  # imports of the tests leave none
warm_starts.install()

# No test depends on how fast the machine is.
settings.register_profile("any machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any machine")

# A shell's background job ignores SIGINT, and so would every process that a test starts and interrupts.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

_LONG_TIMEOUT_S = 3_000
"""Ten times what the slowest test of the long tier takes alone: beside other work a limit of minutes is a flaky test."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Give tests of the long tier and of the soak time on a busy machine."""
    for item in items:
        if item.get_closest_marker("long") or item.get_closest_marker("soak"):
            item.add_marker(pytest.mark.timeout(_LONG_TIMEOUT_S), append=False)


def pytest_collection_finish() -> None:
    """Keep modules and tests out of every collection: there are half a million objects of them."""
    garbage.settle()


def pytest_unconfigure() -> None:
    """Let extension modules end in order: what is frozen is not freed."""
    gc.unfreeze()


@pytest.fixture
def otlp() -> Iterator[OtlpReceiver]:
    """An OTLP/gRPC trace receiver on a free port; `otlp.environ()` points services at it."""
    with OtlpReceiver() as receiver:
        yield receiver


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Prints how much each test did that says so by `record_property("size", ...)`: samples and wholes can be told apart."""
    sizes = [
        value
        for report in terminalreporter.stats.get("passed", [])
        for name, value in report.user_properties
        if name == "size"
    ]
    if sizes:
        terminalreporter.section("sizes")
        for size in sorted(map(str, sizes)):
            terminalreporter.write_line(size)
