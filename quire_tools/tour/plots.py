"""Plots of numbers over steps: as text for the terminal, as SVG for the page."""

import html
from collections.abc import Sequence
from dataclasses import dataclass

from rich.text import Text

from quire_tools.tour.pictures import Step

EIGHTHS = " ▁▂▃▄▅▆▇█"
_LINE = "━"
_SVG_WIDTH, _SVG_HEIGHT, _MARGIN = 920, 300, 44


@dataclass(frozen=True, slots=True)
class Series:
    """One number per step. `style`: for rich, `colour`: for the SVG."""

    name: str
    values: Sequence[float]
    style: str
    colour: str


@dataclass(frozen=True, slots=True)
class Plot:
    """`area`, filled from 0, and `line` over the step numbers, on a scale from 0 to `top`."""

    steps: Sequence[Step]
    area: Series
    line: Series
    top: float
    unit: str

    # --- in characters ---------------------------------------------------------------------------------------------

    def text(self, *, height: int = 10, width: int = 88) -> Text:
        """The plot as text: one column per step, at most `width` steps."""
        columns = list(zip(self.area.values, self.line.values, strict=True))[:width]
        picture = Text()
        for row in reversed(range(height)):
            picture.append(self._label(row, height), style="dim")
            for amount, limit in columns:
                self._cell(picture, row, amount * height / self.top, limit * height / self.top)
            picture.append("\n")
        picture.append(f"{'step':>6} {self.steps[0]['step']}", style="dim")
        last = str(self.steps[min(width, len(self.steps)) - 1]["step"])
        picture.append(last.rjust(max(0, len(columns) - len(str(self.steps[0]["step"])))), style="dim")
        picture.append("\n       ").append(EIGHTHS[-1], style=self.area.style).append(f" {self.area.name}  ")
        return picture.append(_LINE, style=self.line.style).append(f" {self.line.name}")

    def _label(self, row: int, height: int) -> str:
        """Axis label of every other row: the value at its top."""
        value = f"{self.top * (row + 1) / height:.0f}" if (height - 1 - row) % 2 == 0 else ""
        return f"{value:>6} "

    def _cell(self, picture: Text, row: int, filled: float, limit: float) -> None:
        """Draw one cell; `filled` and `limit` are in rows from below."""
        if row < limit <= row + 1:
            picture.append(_LINE, style=self.line.style)
        else:
            eighths = round(8 * min(1.0, max(0.0, filled - row)))
            picture.append(EIGHTHS[eighths], style=self.area.style)

    # --- as SVG ----------------------------------------------------------------------------------------------------

    def svg(self, title: str) -> str:
        """The plot as an SVG element, with colours for a white page."""
        area = f"{self._path(self.area)} L{self._x(len(self.steps)):.1f},{self._y(0):.1f} L{self._x(0):.1f},{self._y(0):.1f} Z"
        return "\n".join(
            (
                f'<svg role="img" viewBox="0 0 {_SVG_WIDTH} {_SVG_HEIGHT}" width="100%">',
                f"<title>{html.escape(title)}</title>",
                f'<path d="{area}" fill="{self.area.colour}" fill-opacity="0.5"/>',
                f'<path d="{self._path(self.line)}" fill="none" stroke="{self.line.colour}" stroke-width="2.5"/>',
                *self._axes(),
                self._label_svg(_MARGIN + 12, 18, self.area.name, self.area.colour),
                self._label_svg(_MARGIN + 200, 18, self.line.name, self.line.colour),
                "</svg>",
            )
        )

    def _path(self, series: Series) -> str:
        """SVG path of a step function: constant over each step's width."""
        corners = [(place + edge, value) for place, value in enumerate(series.values) for edge in (0, 1)]
        return "M" + " L".join(f"{self._x(x):.1f},{self._y(y):.1f}" for x, y in corners)

    def _x(self, place: float) -> float:
        return _MARGIN + (_SVG_WIDTH - _MARGIN - 10) * place / len(self.steps)

    def _y(self, value: float) -> float:
        return _SVG_HEIGHT - _MARGIN - (_SVG_HEIGHT - _MARGIN - 26) * value / self.top

    def _axes(self) -> list[str]:
        marks = [
            self._label_svg(_MARGIN - 6, self._y(value) + 4, f"{value:.0f}", "#333", anchor="end")
            for value in (0, self.top / 2, self.top)
        ]
        ends = [
            self._label_svg(self._x(place), self._y(0) + 18, str(self.steps[place]["step"]), "#333")
            for place in (0, len(self.steps) // 2, len(self.steps) - 1)
        ]
        left, right, bottom = self._x(0), self._x(len(self.steps)), self._y(0)
        path = f"M{left:.1f},{self._y(self.top):.1f} L{left:.1f},{bottom:.1f} L{right:.1f},{bottom:.1f}"
        frame = f'<path d="{path}" fill="none" stroke="#333"/>'
        return [frame, *marks, *ends, self._label_svg((left + right) / 2, bottom + 36, f"{self.unit}, by step", "#333")]

    @staticmethod
    def _label_svg(x: float, y: float, text: str, colour: str, *, anchor: str = "start") -> str:
        return (
            f'<text x="{x:.1f}" y="{y:.1f}" font-size="13" font-family="sans-serif" fill="{colour}" '
            f'text-anchor="{anchor}">{html.escape(text)}</text>'
        )
