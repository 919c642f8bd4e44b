"""Text pictures for screens: timetables of requests by step, stacked bars, and two pictures side by side."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

Step = Mapping[str, Any]
"""A step in the format of `quire steps --json`."""
Cell = tuple[str, str]
"""A cell of a timetable: its text and style."""

PREFILL, DECODE, IDLE = "▒", "█", "·"
PREFILL_STYLE, DECODE_STYLE, IDLE_STYLE = "yellow", "green", "bright_black"
_RULER_EVERY = 5


# --- timetables ----------------------------------------------------------------------------------------------------


def share(step: Step, name: str) -> Mapping[str, Any] | None:
    """A request's entry in the step's `scheduled`; None if it is not in the step."""
    return next((group for group in step["scheduled"] if group["id"] == name), None)


def mark_cell(step: Step, name: str) -> Cell:
    """A one-column cell: prefill, decode, or not in the step."""
    group = share(step, name)
    if group is None:
        return IDLE, IDLE_STYLE
    return (PREFILL, PREFILL_STYLE) if group["prefill"] else (DECODE, DECODE_STYLE)


def token_cell(width: int) -> Callable[[Step, str], Cell]:
    """A cell of `width` columns with the number of the request's tokens computed in the step."""

    def cell(step: Step, name: str) -> Cell:
        group = share(step, name)
        if group is None:
            return f"{IDLE:>{width}}", IDLE_STYLE
        style = f"black on {PREFILL_STYLE}" if group["prefill"] else f"black on {DECODE_STYLE}"
        return f"{group['tokens']:>{width}}", style

    return cell


def timetable(
    steps: Sequence[Step], names: Sequence[str], cell: Callable[[Step, str], Cell] = mark_cell, *, width: int = 1
) -> Text:
    """One row per request with one cell of `width` columns per step, below a ruler of step numbers."""
    label = max((len(name) for name in names), default=0) + 1
    picture = Text(" " * label + _ruler(steps, width), style="dim")
    for name in names:
        picture.append(f"\n{name:<{label}}", style="bold not dim")
        for step in steps:
            text, style = cell(step, name)
            picture.append(text, style=f"{style} not dim")
    return picture


def _ruler(steps: Sequence[Step], width: int) -> str:
    """Every fifth step number, if it fits, right-aligned above its cell."""
    line = ""
    for place, step in enumerate(steps, 1):
        number = str(step["step"])
        if (place == 1 or place % _RULER_EVERY == 0) and len(line) + len(number) < place * width + 1:
            line = line.ljust(place * width - len(number)) + number
        elif place == 1:
            line = number
    return line


def legend(*entries: tuple[str, str, str]) -> Text:
    """One line of (sign, style, meaning) entries."""
    line = Text()
    for sign, style, meaning in entries:
        line.append(sign, style=style).append(f" {meaning}   ")
    return line


TIMETABLE_LEGEND = (
    (PREFILL, PREFILL_STYLE, "prefill"),
    (DECODE, DECODE_STYLE, "decode"),
    (IDLE, IDLE_STYLE, "not in the step"),
)


# --- bars ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class BarPart:
    """A part of a bar. `sign`: the character it is drawn with, so that colours are not needed."""

    name: str
    amount: float
    sign: str
    style: str


def bar(parts: Sequence[BarPart], *, total: float | None = None, width: int = 60) -> Text:
    """A stacked bar; `width` columns stand for `total` (None = the sum of the parts).

    Boundaries are rounded, not lengths, so the bar is never longer than its sum.
    """
    whole = sum(part.amount for part in parts) if total is None else total
    line, so_far, end = Text(), 0.0, 0
    for part in parts:
        so_far += part.amount
        until = round(width * so_far / whole) if whole else 0
        line.append(part.sign * (until - end), style=part.style)
        end = until
    return line


def bars(rows: Mapping[str, Sequence[BarPart]], *, width: int = 60, unit: str | None = "") -> Table:
    """One labelled bar per row, all on the scale of the longest, followed by its sum (`unit` None = without)."""
    total = max((sum(part.amount for part in parts) for parts in rows.values()), default=0.0)
    table = Table.grid(padding=(0, 2))
    table.add_column(style="bold")
    table.add_column(min_width=width)
    table.add_column(justify="right")
    for label, parts in rows.items():
        amount = sum(part.amount for part in parts)
        table.add_row(label, bar(parts, total=total, width=width), "" if unit is None else f"{amount:,.6g}{unit}")
    return table


# --- layout --------------------------------------------------------------------------------------------------------


def table(
    columns: Sequence[str], rows: Iterable[Sequence[RenderableType]], *, gap: int = 2, right: bool = False
) -> Table:
    """A table of lines that do not wrap, `gap` columns apart; `right`: columns behind the first are aligned right."""
    found = Table(box=None, padding=(0, gap, 0, 0), header_style="bold")
    for place, name in enumerate(columns):
        found.add_column(name, no_wrap=True, justify="right" if right and place else "left")
    for row in rows:
        found.add_row(*row)
    return found


def grid(rows: Iterable[Sequence[RenderableType]]) -> Table:
    """Rows without headings, two columns of space between cells."""
    found = Table.grid(padding=(0, 2))
    for row in rows:
        found.add_row(*row)
    return found


def side_by_side(*columns: tuple[str, RenderableType]) -> Table:
    """(heading, picture) pairs in columns."""
    table = Table.grid(padding=(0, 3))
    for _ in columns:
        table.add_column()
    table.add_row(*(Text(heading, style="bold underline") for heading, _ in columns))
    table.add_row(*(picture for _, picture in columns))
    return table
