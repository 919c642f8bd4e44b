"""The screen of `quire top` as a pure function of numbers, view and size."""

import io
import time
from dataclasses import replace

import pytest
from rich.cells import cell_len
from rich.console import Console

from quire_tools.top import bars
from quire_tools.top.drawing import Surroundings, frame
from quire_tools.top.keys import BoundKey, decode
from quire_tools.top.numbers import TopNumbers
from quire_tools.top.requests_table import duration
from quire_tools.top.screen import plain_text
from quire_tools.top.states import TopState
from quire_tools.top.view import SORTS, TopView
from tests.quire_tools.top.answers import busy

AROUND = Surroundings("127.0.0.1:50052")


def _state(numbers: TopNumbers | None, **others: object) -> TopState:
    return TopState(numbers, "12:03:22", read_s=time.monotonic(), **others)  # type: ignore[arg-type]


def _screen(
    state: TopState, view: TopView | None = None, width: int = 80, height: int = 24, around: Surroundings = AROUND
) -> list[str]:
    console = Console(
        file=io.StringIO(), width=width, height=height, force_terminal=True, color_system=None, legacy_windows=False
    )
    console.print(frame(state, view or TopView(), around, width, height), end="")
    return console.file.getvalue().splitlines()  # type: ignore[attr-defined]


@pytest.mark.parametrize(("width", "height"), [(80, 24), (100, 30), (132, 43), (200, 60)])
def test_it_fills_the_terminal_and_no_more(width: int, height: int) -> None:
    """Exactly its lines, none longer than it, at every size from 80 x 24 on; the essentials in each."""
    lines = _screen(_state(busy()), width=width, height=height)
    assert len(lines) == height
    assert all(cell_len(line) <= width for line in lines)
    text = "\n".join(lines)
    for fact in ("serving", "1/2 workers", "step 400", "running", "85", "swapped", "1,712 out", "96%", "BEHIND", "NEED_BLOCKS",
                 "p50", "p99", "preempted 1", "model 36%", "24% of prompt tokens cached", "swap-0", "too few free"):  # fmt: skip
        assert fact in text, fact
    assert ("it cannot be reached" in text) == (height >= 32)
    assert ("acme" in text) == (height >= 32 or width >= 110)


@pytest.mark.parametrize(("width", "height"), [(1, 1), (20, 5), (40, 12), (79, 23)])
def test_smaller_terminals_get_what_fits(width: int, height: int) -> None:
    """Nothing breaks."""
    lines = _screen(_state(busy()), width=width, height=height)
    assert len(lines) <= height and all(cell_len(line) <= width for line in lines)


def test_the_share_of_steps_repeated_by_grants() -> None:
    """Where there are some."""
    numbers = busy()
    assert "repeated" not in "\n".join(_screen(_state(numbers), width=132, height=43))
    repeated = replace(numbers.steps, num_repeated=numbers.steps.num_steps)
    text = "\n".join(_screen(_state(replace(numbers, steps=repeated)), width=132, height=43))
    assert "100% repeated by grants" in text


def test_more_room_shows_more_requests() -> None:
    """Rows grow with the height."""
    rows = [sum("wait-" in line for line in _screen(_state(busy()), height=height)) for height in (24, 40, 60)]
    assert rows[0] >= 5 and rows[0] < rows[1] < rows[2]


def test_nothing_yet_and_away() -> None:
    """Before the first answer it says what it does; a scheduler that is away is named, with the last numbers below."""
    assert "connecting" in "\n".join(_screen(_state(None)))
    away = _screen(_state(None, problem="no admin listener answers at 127.0.0.1:1"))
    assert "unreachable (last answer never; retrying)" in away[0]
    kept = _screen(_state(busy(), problem="no admin listener answers"))
    assert "unreachable" in kept[0] and "85" in "\n".join(kept)


def test_an_answer_that_does_not_come_is_said() -> None:
    """A call that hangs is neither an answer nor an error; a paused screen waits for none."""
    old = replace(_state(busy()), read_s=time.monotonic() - 60)
    assert "no answer for 60 s" in _screen(old, width=132)[0]
    assert "no answer" not in _screen(old, TopView(is_paused=True), width=132)[0]


def test_pause_and_keys_are_said() -> None:
    """In the first line, and in the last."""
    lines = _screen(_state(busy()), TopView(is_paused=True))
    assert "PAUSED" in lines[0] and "resume" in lines[-1]
    assert "Ctrl-C" in _screen(_state(busy()), around=replace(AROUND, has_keys=False))[-1]


def test_an_idle_scheduler() -> None:
    """Nothing waits, no steps, no pools: said in words."""
    numbers = busy()
    idle = replace(numbers, waits=(), pools=(), requests=(), steps=replace(numbers.steps, p50_ms=None), draining=True)
    text = "\n".join(_screen(_state(idle)))
    for words in ("no request waits", "no worker has reported", "no step yet", "draining"):
        assert words in text


# --- sorting and scrolling --------------------------------------------------------------------------------------------


def test_those_that_wait_longest_come_first() -> None:
    """Until the user chooses another order."""
    rows = sorted(busy().requests, key=SORTS["waiting"])
    assert [row.id for row in rows[:3]] == ["swap-0", "01a201fb-a15a-7abd-8892-000000000000", "wait-0"]
    assert sorted(busy().requests, key=SORTS["age"])[0].id == "run-0"
    assert sorted(busy().requests, key=SORTS["preempted"])[0].id == "swap-0"


def test_scrolling_ends_at_the_end() -> None:
    """The last row stays the last."""
    lines = _screen(_state(busy()), TopView(sort="waiting", offset=10_000))
    assert "run-19" in lines[-2]


def test_keys_change_the_view() -> None:
    """Each letter and arrow; others do nothing."""
    view = TopView()
    for key in decode("s\x1b[B\x1b[Bp"):
        view = view.after(key)
    assert view == TopView(sort="age", offset=2, is_paused=True)
    assert view.after(BoundKey.UP).offset == 1 and view.after(BoundKey.LEFT) == TopView(sort="waiting", is_paused=True)
    assert TopView().after(BoundKey.LEFT).sort == tuple(SORTS)[-1]
    assert TopView().after(BoundKey.UP).offset == 0 and TopView().after(BoundKey.QUIT).is_over
    assert view.after(BoundKey.PAUSE).is_paused is False


@pytest.mark.parametrize(
    ("sent", "keys"),
    [
        ("q", [BoundKey.QUIT]),
        ("\x1b[C\x1bOD", [BoundKey.RIGHT, BoundKey.LEFT]),
        ("\x1b[5~\x1b[6~", [BoundKey.PAGE_UP, BoundKey.PAGE_DOWN]),
        ("\x1b[1;5Cp", [BoundKey.PAUSE]),
        ("\x1b", []),
        ("\x1b[", []),
        ("xyz", []),
        ("", []),
    ],
)
def test_what_terminals_send(sent: str, keys: list[BoundKey]) -> None:
    """Sequences of both kinds of terminals; unknown ones are left out whole."""
    assert decode(sent) == keys


# --- bars and text ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("values", [(0, 0, 0), (1, 0, 0), (1, 1, 1), (288, 9, 3), (1, 10_000, 1), (5, 3, 2)])
@pytest.mark.parametrize("width", [0, 1, 3, 22, 100])
def test_stacked_bars_fill_their_width(values: tuple[int, ...], width: int) -> None:
    """To the cell; what is more than nothing is seen where there is room for all."""
    bar = bars.stacked([(value, character, "") for value, character in zip(values, "abc", strict=True)], width).plain
    assert len(bar) == (width if sum(values) else 0)
    if width >= 3:
        assert {character for value, character in zip(values, "abc", strict=True) if value} == set(bar)


def test_bars_and_sparklines() -> None:
    """Nothing is empty, all is full, the largest value is the highest."""
    assert bars.filled(0, 10, 4, "").plain == "    " and bars.filled(10, 10, 4, "").plain == "████"
    assert bars.filled(1, 10_000, 4, "").plain == "█   " and bars.filled(1, 0, 2, "").plain == "  "
    assert bars.columns([0, 1, 2, 4], 10) == ["▁▂▄█"] and bars.columns([9, 1, 1], 2) == ["██"]
    assert bars.columns([1, 3, 4], 10, 2) == [" ▄█", "▄██"]
    assert bars.columns([], 5) == [""] and bars.columns([0.0], 5) == ["▁"]


def test_durations_have_few_letters() -> None:
    """At every size."""
    assert [duration(s) for s in (0.04, 99.9, 100, 3_599, 7_260)] == ["0.0s", "99.9s", "1m40s", "59m59s", "2h01m"]


def test_plain_text_says_the_same_without_colours() -> None:
    """For pipes: lines, no escapes."""
    text = plain_text(busy(), TopView(), "12:03:22")
    assert "\x1b" not in text and text.startswith("12:03:22  serving  step 400")
    for fact in ("20 running, 85 waiting, 2 swapped", "288 used, 9 cached, 3 free of 300", "84 waiting: BEHIND", "worker 1",
                 "tenant acme", "p50 8.00 ms", "23.8% of the prompt"):  # fmt: skip
        assert fact in text, fact
