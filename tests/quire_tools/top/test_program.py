"""`quire top` as people and programs run it: on a terminal, in a pipe, on a recording; with a scheduler that goes away."""

import json
import os
import pty
import select
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from quire.cli import main
from quire.operators.admin import AdminClient
from quire_tools.reasons_now import BEFORE
from quire_tools.top import screen
from quire_tools.top.live import LiveTopSource, SourceReader
from quire_tools.top.recorded import RecordedTopSource
from quire_tools.top.states import TopState
from scheduler_svc.observe.recording.file_format import Recording
from svc_common.errors import InvalidArgument, Unavailable
from tests.quire_tools.top.answers import busy
from tests.quire_tools.top.scripted_scheduler import ScriptedScheduler
from tests.support.core.recorded_lives import recorded
from tests.support.stack.up_process import ROOT


@pytest.fixture
def scheduler() -> Iterator[ScriptedScheduler]:
    served = ScriptedScheduler()
    served.start()
    try:
        yield served
    finally:
        served.stop()


# --- reading ----------------------------------------------------------------------------------------------------------


def test_it_asks_for_each_step_once(scheduler: ScriptedScheduler) -> None:
    """Between two looks the scheduler does nothing for it."""
    with AdminClient(scheduler.address) as client:
        source = LiveTopSource(client)
        assert source.numbers().steps.num_steps == 100
        assert source.numbers().steps.num_steps == 100
    assert scheduler.since == [276, 401]
    assert sorted(scheduler.calls) == sorted(["GetLoad", "ListRequests", "ListWorkers"] * 2)


def test_a_scheduler_that_is_away_is_waited_for(scheduler: ScriptedScheduler) -> None:
    """The last numbers stay, the problem is said, and it goes on by itself; `--once` does not wait."""
    with AdminClient(scheduler.address) as client:
        source = LiveTopSource(client)
        before = source.read()
        scheduler.stop()
        away = source.read()
        assert away.problem and away.numbers is before.numbers and away.read_s == before.read_s
        with pytest.raises(Unavailable):
            source.last()
        scheduler.start()
        deadline_s = time.monotonic() + 40
        while (back := source.read()).problem and time.monotonic() < deadline_s:
            time.sleep(0.05)
        assert back.problem == "" and back.numbers is not before.numbers


def test_a_reader_ends_with_what_cannot_be_helped() -> None:
    """Trying again would not change it."""

    class Refusing:
        title, is_live = "x", True

        def read(self) -> TopState:
            raise InvalidArgument("no")

        last = read

    with SourceReader(Refusing(), 0.01) as reader:
        deadline_s = time.monotonic() + 40
        while reader.error is None and time.monotonic() < deadline_s:
            time.sleep(0.01)
    assert isinstance(reader.error, InvalidArgument) and reader.has_news() and not reader.has_news()


# --- the command ------------------------------------------------------------------------------------------------------


def test_once_as_text_and_as_json(scheduler: ScriptedScheduler, capsys: pytest.CaptureFixture[str]) -> None:
    """One look; a scheduler that is not there is not waited for."""
    written: list[str] = []
    with AdminClient(scheduler.address) as client:
        screen.once(LiveTopSource(client), written.append, as_json=False)
    assert "84 waiting: BEHIND" in written[0]
    with pytest.raises(SystemExit, match="0"):
        main(["top", "--once", "--json", "--admin", scheduler.address])
    values = json.loads(capsys.readouterr().out)
    assert (values["waiting"], values["steps"]["last_step"]) == (85, 400)
    scheduler.stop()
    with AdminClient(scheduler.address) as client, pytest.raises(Unavailable, match="no admin listener"):
        screen.once(LiveTopSource(client), written.append, as_json=False)


class _Scripted:
    """Says what it is given, one state each time; the last one is its end."""

    title, is_live = "127.0.0.1:50052", False

    def __init__(self, *states: TopState) -> None:
        self._states = list(states)

    def read(self) -> TopState:
        return self._states.pop(0)

    last = read


def test_a_pipe_gets_a_frame_each_time() -> None:
    """An outage is a frame too, and the program goes on until its source is over."""
    away = TopState(busy(), "12:03:22", "nobody answers")
    states = (TopState(busy(), "12:03:21"), away, TopState(busy(), "12:03:23", is_over=True))
    for as_json, texts in (
        (False, ("12:03:21  serving", "unreachable", "12:03:23  serving")),
        (True, ('"running": 20',) * 3),
    ):
        written: list[str] = []
        screen.lines(_Scripted(*states), written.append, interval_s=60.0, as_json=as_json)
        assert len(written) == 3
        assert texts[0] in written[0] and texts[2] in written[2]
        assert ("nobody answers" in written[1]) and ("running" not in written[1])


class _Terminal:
    """The program on a pseudo-terminal of 80 x 24."""

    def __init__(self, *arguments: str) -> None:
        self.number, inner = pty.openpty()
        termios.tcsetwinsize(inner, (24, 80))
        self.modes = termios.tcgetattr(inner)
        self.text = ""
        environ = {**os.environ, "TERM": "xterm-256color", "COLUMNS": "80", "LINES": "24"}
        command = [sys.executable, "-m", "quire", "top", *arguments]
        self.process = subprocess.Popen(command, cwd=ROOT, stdin=inner, stdout=inner, stderr=inner, env=environ)
        self.inner = inner

    def wait_for(self, words: str, timeout_s: float = 60.0) -> None:
        """Until it writes them; what came before is forgotten."""
        self._read(lambda: words in self.text, timeout_s)
        assert words in self.text, self.text[-3000:]
        self.text = ""

    def press(self, keys: str) -> None:
        os.write(self.number, keys.encode())

    def end(self) -> int:
        self._read(lambda: self.process.poll() is not None, 20.0)
        return self.process.wait(20)

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        os.close(self.inner)
        os.close(self.number)

    def _read(self, enough: Callable[[], bool], timeout_s: float) -> None:
        deadline_s = time.monotonic() + timeout_s
        while not enough() and time.monotonic() < deadline_s:
            if select.select([self.number], [], [], 0.05)[0]:
                self.text += os.read(self.number, 65_536).decode("utf-8", "replace")


def test_a_person_watches(scheduler: ScriptedScheduler) -> None:
    """Keys work at once, an outage is said and ends, and the terminal is as it was."""
    terminal = _Terminal("--admin", scheduler.address, "--interval", "0.2")
    try:
        terminal.wait_for("NEED_BLOCKS")
        terminal.press("s")
        terminal.wait_for("sorted by age")
        terminal.press("\x1b[D")
        terminal.wait_for("sorted by waiting")
        terminal.press("p")
        terminal.wait_for("PAUSED")
        terminal.press("p")
        scheduler.stop()
        terminal.wait_for("unreachable")
        scheduler.start()
        terminal.wait_for("serving")
        terminal.press("q")
        assert terminal.end() == 0
        assert termios.tcgetattr(terminal.inner) == terminal.modes
    finally:
        terminal.close()


# --- recordings -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", ["quire", "vllm-v0"])
def test_a_recording_is_watched(policy: str, tmp_path: Path) -> None:
    """Moment by moment to its end; the end is the one that `last` shows, and those that wait have reasons."""
    path = tmp_path / "life.rec"
    recorded(policy, 1).write(path)
    found = Recording(path)
    source, states = RecordedTopSource(found, 0.05), []
    while not states or not states[-1].is_over:
        states.append(source.read())
    assert not any(state.problem for state in states)
    steps = [state.numbers.step for state in states if state.numbers is not None]
    assert steps == sorted(steps) and steps[-1] >= found.num_steps > 20
    waits = {wait.reason for state in states if state.numbers for wait in state.numbers.waits}
    assert waits and BEFORE not in waits
    end = RecordedTopSource(found, 1.0).last()
    assert end.is_over and end.numbers == states[-1].numbers
