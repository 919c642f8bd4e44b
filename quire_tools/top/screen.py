"""The main loop of `quire top`: a live screen on a terminal, lines of text or JSON elsewhere."""

import json
import time
from collections.abc import Callable

from rich.console import Console
from rich.live import Live

from quire_tools.top.drawing import Surroundings, frame
from quire_tools.top.keys import Keys
from quire_tools.top.live import SourceReader
from quire_tools.top.numbers import numbers_json
from quire_tools.top.plain import plain_text
from quire_tools.top.states import Source, TopState
from quire_tools.top.view import TopView

_TICK_S = 0.25

Write = Callable[[str], None]


def show(source: Source, console: Console, *, interval_s: float) -> None:
    """Show a live screen until a key ends it. Raises the error that ended the source."""
    keys, view = Keys(), TopView()
    with (
        SourceReader(source, interval_s) as reader,
        keys.ready(),
        Live(console=console, screen=True, auto_refresh=False) as live,
    ):
        around = Surroundings(source.title, interval_s, has_keys=keys.are_there)
        while not view.is_over and reader.error is None:
            live.update(frame(reader.state, view, around, *console.size), refresh=True)
            view = _turn(reader, keys, view, console)
    if reader.error is not None:
        raise reader.error


def _turn(reader: SourceReader, keys: Keys, view: TopView, console: Console) -> TopView:
    """Handle keys until the screen must be redrawn: a key, new numbers, a resized terminal, or one second."""
    size, deadline_s = console.size, time.monotonic() + 1.0
    while time.monotonic() < deadline_s:
        pressed = keys.pressed(_TICK_S)
        for key in pressed:
            view = view.after(key)
        reader.is_paused = view.is_paused
        if pressed or reader.has_news() or console.size != size:
            break
    return view


def once(source: Source, write: Write, *, as_json: bool) -> None:
    """Write one frame. Raises QuireError if there are no numbers."""
    state = source.last()
    write(_json_line(state) if as_json else _text(state, source))


def lines(source: Source, write: Write, *, interval_s: float, as_json: bool) -> None:
    """Write one frame per interval, for pipes, until the source ends."""
    while True:
        began_s = time.monotonic()
        state = source.read()
        write(_json_line(state) if as_json else _text(state, source))
        if state.is_over:
            return
        time.sleep(max(0.0, began_s + interval_s - time.monotonic()) if source.is_live else 0.0)


def _json_line(state: TopState) -> str:
    """One JSON line; without numbers, `numbers` is null and `problem` says why."""
    if state.problem or state.numbers is None:
        return json.dumps({"problem": state.problem, "numbers": None})
    return json.dumps(numbers_json(state.numbers))


def _text(state: TopState, source: Source) -> str:
    if state.problem or state.numbers is None:
        what = " is unreachable, retrying" if source.is_live else ""
        return f"{source.title}{what}: {state.problem or 'no step'}"
    return plain_text(state.numbers, TopView(), state.when)
