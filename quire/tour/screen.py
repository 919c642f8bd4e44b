"""What a stop of the tour shows: a picture, numbers with the requirements they are about, and checks that decide its verdict."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

from quire.tour.stage import Stage

WIDTH, HEIGHT = 100, 40
"""Columns and lines that a screen has."""


@dataclass(frozen=True, slots=True)
class Check:
    """Something that must hold. `seen`: what was read from the live system, for people."""

    what: str
    passed: bool
    seen: str


@dataclass(frozen=True, slots=True)
class Number:
    """A number of the screen, as it was read or computed from what was read. `requirement`: which one it is about, "R209"."""

    what: str
    value: int | float | str
    requirement: str = ""

    @property
    def text(self) -> str:
        """As it is printed; whole numbers without separators, others with up to four digits."""
        return f"{self.value:.4g}" if isinstance(self.value, float) else str(self.value)


@dataclass(frozen=True, slots=True)
class Screen:
    """One page of at most WIDTH x HEIGHT. `parts` from top to bottom, a string is a paragraph; then the numbers, then the checks.

    `drawings`: SVG elements that the HTML page has below it.
    """

    title: str
    requirements: Sequence[str]
    parts: Sequence[RenderableType]
    checks: Sequence[Check]
    numbers: Sequence[Number] = ()
    drawings: Sequence[str] = ()

    @property
    def passed(self) -> bool:
        """Whether there are checks and all of them hold."""
        return bool(self.checks) and all(check.passed for check in self.checks)

    @property
    def trouble(self) -> str:
        """What does not hold, for the verdict; empty = everything does."""
        if not self.checks:
            return "nothing was checked"
        return "; ".join(f"{check.what}: {check.seen}" for check in self.checks if not check.passed)

    def picture(self) -> RenderableType:
        """All of it but the verdict."""
        head = Rule(f"{self.title}  ({' '.join(self.requirements)})", align="left", style="cyan")
        numbers = [_number_table(self.numbers)] if self.numbers else []
        return _Sections([[head, *self.parts[:1]], self.parts[1:], numbers, [_check_table(self.checks)]])


@dataclass(frozen=True, slots=True)
class _Sections:
    """Parts one under the other, with a blank line between sections as far as the page has room, the verdict's line left free."""

    sections: Sequence[Sequence[RenderableType]]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        groups = [Group(*section) for section in self.sections if section]
        room = HEIGHT - 1 - sum(len(console.render_lines(group, options)) for group in groups)
        for number, group in enumerate(groups):
            if number and room >= len(groups) - number:
                yield ""
            yield group


@dataclass(frozen=True, slots=True)
class Stop:
    """A stop of the tour. `show` drives a stack of the stage and returns what it saw; its errors are the stop's failure."""

    name: str
    summary: str
    requirements: tuple[str, ...]
    show: Callable[[Stage], Screen]


def _number_table(numbers: Sequence[Number]) -> Table:
    """Two numbers a line, so that a page has room."""
    table = Table.grid(padding=(0, 2))
    for _ in range(2):
        table.add_column(max_width=34)
        table.add_column(justify="right", style="bold")
        table.add_column(style="cyan", no_wrap=True)
    rows = (len(numbers) + 1) // 2
    cells = [(number.what, number.text, number.requirement) for number in numbers] + [("", "", "")]
    for left, right in zip(cells[:rows], cells[rows : 2 * rows], strict=True):
        table.add_row(*left, *right)
    return table


def _check_table(checks: Sequence[Check]) -> Table:
    table = Table.grid(padding=(0, 2))
    for check in checks:
        mark = Text("✓", style="green") if check.passed else Text("✗", style="bold red")
        table.add_row(mark, check.what, Text(check.seen, style="dim"))
    return table
