"""Draw numbers as a terminal screen: `frame` is a pure function of numbers, view and size. Its boxes: quire_tools.top.panels."""

from dataclasses import dataclass

from rich.layout import Layout
from rich.text import Text

from quire_tools.top import panels
from quire_tools.top.numbers import TopNumbers
from quire_tools.top.requests_table import requests_table
from quire_tools.top.states import TopState
from quire_tools.top.view import TopView

_QUEUES_HEIGHT = 6
_WHY_HEIGHT = 7
_MOST_EXTRA = 6
_LEAST_TABLE = 9
_LARGE = 32
_STALE_S = 3.0


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What a frame shows beside the numbers. `title`: name of the source; `has_keys`: whether keys can be read."""

    title: str
    interval_s: float = 1.0
    has_keys: bool = True


def frame(state: TopState, view: TopView, around: Surroundings, width: int, height: int) -> Layout:
    """The whole screen. Everything fits into 80 x 24; larger terminals show more."""
    parts = [Layout(_head(state, view, around), size=1)]
    if state.numbers is None:
        parts.append(Layout(panels.nothing_yet(state.problem or "connecting ..."), ratio=1))
    else:
        parts += _body(state.numbers, view, width, height - 2)
    parts.append(Layout(_foot(view, around, width), size=1))
    whole = Layout()
    whole.split_column(*parts)
    return whole


def _body(numbers: TopNumbers, view: TopView, width: int, height: int) -> list[Layout]:
    details = panels.details(numbers) if height + 2 >= _LARGE else []
    details_height = max((part.height for part in details), default=0)
    spare = max(0, height - _QUEUES_HEIGHT - _WHY_HEIGHT - details_height - _LEAST_TABLE)
    why_height = _WHY_HEIGHT + min(_MOST_EXTRA, spare // 3)
    half = width // 2
    body = [
        _row(_QUEUES_HEIGHT, panels.queues(numbers, half), panels.pools(numbers, width - half)),
        _row(why_height, panels.why(numbers, half, why_height), panels.steps(numbers, width - half, why_height)),
    ]
    if details:
        row = Layout(size=details_height)
        row.split_row(*(Layout(part.panel, ratio=part.ratio) for part in details))
        body.append(row)
    table_height = height - _QUEUES_HEIGHT - why_height - details_height
    body.append(Layout(requests_table(numbers, view, width, table_height), ratio=1))
    return body


def _row(height: int, *renderables: panels.Drawn) -> Layout:
    row = Layout(size=height)
    row.split_row(*(Layout(renderable) for renderable in renderables))
    return row


def _head(state: TopState, view: TopView, around: Surroundings) -> Text:
    """Headline: source, state and time; problems in red."""
    line = Text(no_wrap=True, overflow="ellipsis")
    line.append("quire top ", style="bold")
    if view.is_paused:
        line.append("PAUSED ", style="bold yellow")
    line.append(around.title)
    numbers = state.numbers
    if numbers is not None:
        line.append_text(_condition(numbers))
        line.append(f"  {numbers.policy}" if numbers.policy else "")
        line.append(f"  step {numbers.step:,}  {state.when}")
    if state.problem:
        since = f"{state.age_s:.0f} s ago" if numbers is not None else "never"
        text = Text("unreachable ", style="bold red", no_wrap=True, overflow="ellipsis")
        return text.append(f"(last answer {since}; retrying) ").append(state.problem, style="red")
    if numbers is not None and not view.is_paused and state.age_s > around.interval_s + _STALE_S and not state.is_over:
        line.append(f"  no answer for {state.age_s:.0f} s", style="bold red")
    return line


def _condition(numbers: TopNumbers) -> Text:
    num_ready = sum(worker.ready for worker in numbers.workers)
    text = Text("  ")
    if numbers.draining:
        text.append("draining", style="yellow")
    else:
        text.append("serving" if numbers.serving else "not serving", style="green" if numbers.serving else "bold red")
    if len(numbers.workers) > 1 or num_ready < len(numbers.workers):
        style = "" if num_ready == len(numbers.workers) else "bold red"
        text.append(f"  {num_ready}/{len(numbers.workers)} workers", style=style)
    return text


def _foot(view: TopView, around: Surroundings, width: int) -> Text:
    line = Text(no_wrap=True, overflow="ellipsis", style="reverse")
    if not around.has_keys:
        line.append(" Ctrl-C to quit ")
        line.pad_right(max(0, width - len(line)))
        return line
    for key, what in (
        ("q", "quit"),
        ("p", "resume" if view.is_paused else "pause"),
        ("s ←→", f"sorted by {view.sort}"),
        ("↑↓", "scroll"),
    ):
        line.append(f" {key} ", style="bold").append(f"{what} ")
    line.pad_right(max(0, width - len(line)))
    return line
