"""The screen of a stop: a picture, numbers, and the checks that decide its verdict."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

from quire_tools.tour.stage import Stage

WIDTH, HEIGHT = 100, 40
"""Columns and lines of a screen."""


@dataclass(frozen=True, slots=True)
class Check:
    """A condition that must hold. `seen`: what was read from the live system, as text."""

    what: str
    passed: bool
    seen: str


@dataclass(frozen=True, slots=True)
class Number:
    """A number shown, read from the stack or computed from what was read."""

    what: str
    value: int | float | str

    @property
    def text(self) -> str:
        """The printed form: integers without separators, floats with up to four digits."""
        return f"{self.value:.4g}" if isinstance(self.value, float) else str(self.value)


@dataclass(frozen=True, slots=True)
class Scene:
    """One of several parts of a screen: a heading, a picture, numbers read from the stack, and checks on them."""

    heading: str
    picture: RenderableType
    numbers: Sequence[Number]
    checks: Sequence[Check]


@dataclass(frozen=True, slots=True)
class Screen:
    """One page of at most WIDTH x HEIGHT: `parts` from top to bottom (a string is a paragraph), then numbers, then checks.

    `page`: the document that explains it. `drawings`: SVG elements that the HTML page shows below it.
    """

    title: str
    page: str
    parts: Sequence[RenderableType]
    checks: Sequence[Check]
    numbers: Sequence[Number] = ()
    drawings: Sequence[str] = ()

    @property
    def passed(self) -> bool:
        """True if there are checks and all of them hold."""
        return bool(self.checks) and all(check.passed for check in self.checks)

    @property
    def trouble(self) -> str:
        """The checks that failed, as text for the verdict; empty = none."""
        if not self.checks:
            return "nothing was checked"
        return "; ".join(f"{check.what}: {check.seen}" for check in self.checks if not check.passed)

    def picture(self) -> RenderableType:
        """Everything but the verdict."""
        head = Rule(f"{self.title}  ({self.page})", align="left", style="cyan")
        numbers = [_number_table(self.numbers)] if self.numbers else []
        return _Sections([[head, *self.parts[:1]], self.parts[1:], numbers, [_check_table(self.checks)]])


@dataclass(frozen=True, slots=True)
class _Sections:
    """Sections one below the other, separated by blank lines as far as the page has room; leaves the verdict's line free."""

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
    """A stop of the tour. `page`: the document that explains it, with its section.

    `show` drives a stack of the stage and returns what it saw; an error fails the stop.
    """

    name: str
    summary: str
    page: str
    show: Callable[[Stage], Screen]


Seen = TypeVar("Seen")
"""What a stop read of its stacks."""


def declared(
    name: str,
    summary: str,
    page: str,
    *,
    title: str,
    text: str,
    observe: Callable[[Stage], Seen],
    picture: Callable[[Seen], Iterable[RenderableType]],
    checks: Callable[[Seen], Sequence[Check]],
    numbers: Callable[[Seen], Sequence[Number]],
    drawings: Callable[[Seen], Sequence[str]] = lambda seen: (),
) -> Stop:
    """A stop in its parts: `observe` drives stacks, the others are made of what it returns.

    The screen has `title`, `text` (empty = none) and what `picture` yields from top to bottom.
    """

    def show(stage: Stage) -> Screen:
        seen = observe(stage)
        parts = [*([text] if text else []), *picture(seen)]
        return Screen(title, page, parts, checks(seen), numbers(seen), drawings(seen))

    return Stop(name, summary, page, show)


def all_free(pool: Mapping[str, int]) -> Check:
    """Check that no block of a pool is in use at the end."""
    return Check("all blocks are free at the end", pool["free"] == pool["total"], f"{pool['free']} of {pool['total']}")


def _number_table(numbers: Sequence[Number]) -> Table:
    """Two numbers per line, to save space."""
    table = Table.grid(padding=(0, 2))
    for _ in range(2):
        table.add_column(max_width=34)
        table.add_column(justify="right", style="bold")
    rows = (len(numbers) + 1) // 2
    cells = [(number.what, number.text) for number in numbers] + [("", "")]
    for left, right in zip(cells[:rows], cells[rows : 2 * rows], strict=True):
        table.add_row(*left, *right)
    return table


def _check_table(checks: Sequence[Check]) -> Table:
    table = Table.grid(padding=(0, 2))
    for check in checks:
        mark = Text("✓", style="green") if check.passed else Text("✗", style="bold red")
        table.add_row(mark, check.what, Text(check.seen, style="dim"))
    return table
