"""`quire up`: what it prints, that what dies is started again, and that nothing outlives it."""

import contextlib
import logging
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from quire.cli.serving.load_progress import LoadProgress
from quire.client.sampling_params import SamplingParams
from quire.client.sync_client import Client
from svc_common.observability.log_format import LogFormat, formatter
from tests.support.stack.kill_plan import Killer
from tests.support.stack.kill_signs import LOADING
from tests.support.stack.up_process import ROOT, SERVICE_LINE, UpProcess, is_running, wait_gone

SIMULATED = ("--simulated",)


@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.long)])
def test_prints_services_serves_and_a_signal_stops_all(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """`service NAME pid=N address=HOST:PORT` each, then `ready ...`; it can serve then; a signal leaves nothing running.

    What a service warns of while it starts is on standard error; not that services that start cannot reach each other yet.
    """
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", "parentbased_traceidratio")
    monkeypatch.setenv("OTEL_TRACES_SAMPLER_ARG", "much")
    with UpProcess(*SIMULATED) as up:
        grpc_address, http_url, admin_address = up.wait_ready()
        assert sorted(up.pids) == ["gateway", "scheduler", "worker"]
        assert all(SERVICE_LINE.match(line) for line in up.lines[:-1]), "nothing else on standard output"
        addresses = {m[1]: m[3] for line in up.lines if (m := SERVICE_LINE.match(line))}
        assert addresses["gateway"] == grpc_address
        assert len({*addresses.values(), http_url.removeprefix("http://"), admin_address}) == 5
        with Client(grpc_address) as client:
            output = client.generate("abc", SamplingParams(max_tokens=4, ignore_eos=True))
        assert len(output.outputs[0].token_ids) == 4
        assert up.stop(number) == 0
        assert wait_gone(list(up.pids.values()), timeout_s=0.5) == []
    warned = {line.partition(":")[0] for line in up.errors if "OTEL_TRACES_SAMPLER_ARG=much" in line}
    assert "gateway" in warned
    assert not any("cannot be used" in line or "Traceback" in line for line in up.errors)


def test_services_that_die_are_started_again_and_do_not_outlive_a_killed_parent() -> None:
    """Standard output has their lines once more, with the same addresses; standard error says what died and how; all is served.

    SIGKILL of `quire up` gives it no chance to stop anything; the services end by themselves.
    """
    with UpProcess(*SIMULATED) as up:
        grpc_address, _, _ = up.wait_ready()
        addresses, killed = up.addresses, up.pids
        for pid in killed.values():
            os.kill(pid, signal.SIGKILL)
        up.read_lines(3)
        assert up.addresses == addresses
        assert all(up.pids[name] != pid for name, pid in killed.items())
        for name, pid in killed.items():
            said = f"the {name} (pid {pid}) was killed by signal 9; starting it again in 0.1 s"
            assert [line.strip() for line in up.errors if f"pid {pid}" in line] == [said]
        with Client(grpc_address) as client:
            output = client.generate("abc", SamplingParams(max_tokens=4, ignore_eos=True), timeout_s=30)
        assert len(output.outputs[0].token_ids) == 4
        assert all(is_running(pid) for pid in up.pids.values())
        up.process.kill()
        assert wait_gone([*killed.values(), *up.pids.values()]) == []


@pytest.mark.parametrize("number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.long)])
def test_a_worker_that_is_loading_is_not_killed(number: int, tmp_path: Path) -> None:
    """A signal before it is ready ends all services, and none has to be killed."""
    killer = Killer(tmp_path)
    killer.arm(LOADING)
    with UpProcess(*SIMULATED, environ=killer.environ) as up:
        up.read_lines(3)
        while not killer.hits:
            assert up.process.poll() is None, up.errors
            time.sleep(0.01)
        assert up.stop(number) == 0
        assert wait_gone(list(up.pids.values()), timeout_s=0.5) == []
    assert not any("killed" in line or "Traceback" in line for line in up.errors), up.errors


@pytest.mark.parametrize("form", LogFormat)
def test_services_that_do_not_reach_each_other_yet_are_no_news(
    form: LogFormat, capsys: pytest.CaptureFixture[str]
) -> None:
    """Until all have started; in both forms of the log."""
    record = logging.LogRecord(
        "gateway_svc.engine.scheduler_link", logging.WARNING, "", 0, "it cannot be used", (), None
    )
    line = formatter(form, "gateway").format(record)
    with LoadProgress(form) as progress:
        progress.line("gateway", line)
        assert capsys.readouterr().err == ""
        for other in (line.replace("scheduler_link", "other"), line.replace("WARNING", "ERROR")):
            progress.line("gateway", other)
            assert "cannot be used" in capsys.readouterr().err
        progress.finish()
        progress.line("gateway", line)
        assert "cannot be used" in capsys.readouterr().err


def test_warnings_stand_above_the_progress_bar() -> None:
    """On a terminal the bar is drawn below a whole line."""
    code = (
        "from quire.cli.serving.load_progress import LoadProgress; from svc_common.observability.log_format import LogFormat\n"
        "with LoadProgress(LogFormat.TEXT) as progress:\n"
        "    progress.show('loading weights', 0.5); progress.line('worker', 'WARNING paged_kernels.registry: slow')\n"
        "    progress.show('loading weights', 0.7)"
    )
    terminal, child = os.openpty()
    environ = {**os.environ, "TERM": "xterm", "COLUMNS": "120"}
    with subprocess.Popen([sys.executable, "-c", code], stdout=child, stderr=child, cwd=ROOT, env=environ) as process:
        os.close(child)
        text = _read_to_end(terminal)
        assert process.wait() == 0
    assert "worker: WARNING paged_kernels.registry: slow\r\n" in text
    assert text.rindex("loading weights") > text.index("WARNING")


def _read_to_end(terminal: int) -> str:
    parts = []
    with contextlib.suppress(OSError):  # what a terminal says when its other end is closed
        while part := os.read(terminal, 4096):
            parts.append(part)
    os.close(terminal)
    return b"".join(parts).decode()
