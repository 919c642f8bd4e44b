"""Bars and charts made of characters. Pure."""

from collections.abc import Sequence

from rich.text import Text

_LEVELS = "▁▂▃▄▅▆▇█"
FULL, HALF, EMPTY = "█", "▓", "░"

Part = tuple[float, str, str]
"""A value, the character it is drawn with, and its style."""


def stacked(parts: Sequence[Part], width: int) -> Text:
    """A stacked bar of `width` cells.

    Each part gets cells in proportion, and at least one if it is above 0 and there is room.
    """
    cells = _cells([value for value, _, _ in parts], width)
    bar = Text(no_wrap=True)
    for count, (_, character, style) in zip(cells, parts, strict=True):
        bar.append(character * count, style=style)
    return bar


def filled(value: float, whole: float, width: int, style: str) -> Text:
    """A bar of `value` on a scale where `whole` fills the width."""
    cells = min(width, max(1, round(width * value / whole))) if value > 0 and whole > 0 else 0
    return Text(FULL * cells + " " * (width - cells), style=style, no_wrap=True)


def columns(values: Sequence[float], width: int, height: int = 1) -> list[str]:
    """A chart of the last `width` values on `height` lines, top line first, scaled from 0 to their maximum."""
    shown = values[-width:] if width > 0 else ()
    most = max(shown, default=0.0)
    eighths = [max(1, round(value / most * height * len(_LEVELS))) if most > 0 else 1 for value in shown]
    return ["".join(_cell(e - line * len(_LEVELS)) for e in eighths) for line in reversed(range(height))]


def _cell(eighths: int) -> str:
    """One character, filled from below by `eighths` eighths."""
    return " " if eighths <= 0 else _LEVELS[min(eighths, len(_LEVELS)) - 1]


def _cells(values: Sequence[float], width: int) -> list[int]:
    """Distribute `width` whole cells in proportion to `values` (largest remainder method)."""
    whole = sum(values)
    if whole <= 0 or width <= 0:
        return [0] * len(values)
    exact = [value / whole * width for value in values]
    cells = [max(1, int(e)) if e > 0 else 0 for e in exact]
    order = sorted(range(len(values)), key=lambda i: exact[i] - cells[i], reverse=True)
    for i in order[: max(0, width - sum(cells))]:
        cells[i] += 1
    while sum(cells) > width:
        cells[cells.index(max(cells))] -= 1
    return cells
