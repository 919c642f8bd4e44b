"""The table of requests, with as many columns and rows as fit."""

from collections.abc import Callable
from dataclasses import dataclass

from rich.table import Table
from rich.text import Text

from quire_tools.top.numbers import RequestRow, TopNumbers
from quire_tools.top.panels import QUEUE_COLOURS
from quire_tools.top.view import SORTS, TopView
from quire_tools.top.words import reason_text, short_id


@dataclass(frozen=True, slots=True)
class _Column:
    """A column; shown on terminals at least `least` columns wide."""

    name: str
    cell: Callable[[RequestRow], str]
    width: int
    least: int = 0
    is_number: bool = True


_TENANT = "tenant"
_COLUMNS = (
    _Column("request", lambda row: short_id(row.request_id or row.id), 13, is_number=False),
    _Column(_TENANT, lambda row: row.tenant, 10, 110, is_number=False),
    _Column("queue", lambda row: row.queue, 7, is_number=False),
    _Column("age", lambda row: duration(row.age_s), 7),
    _Column("queued", lambda row: duration(row.waited_s), 7, 100),
    _Column("prompt", lambda row: f"{row.prompt_tokens:,}", 7),
    _Column("cached", lambda row: f"{row.cached_prompt_tokens:,}", 7, 120),
    _Column("out", lambda row: f"{row.output_tokens:,}", 6),
    _Column("n", lambda row: str(row.num_choices), 2, 120),
    _Column("pre", lambda row: str(row.num_preemptions or ""), 3),
    _Column("prio", lambda row: str(row.priority or ""), 4, 120),
)


def requests_table(numbers: TopNumbers, view: TopView, width: int, height: int) -> Table:
    """Requests sorted by the view, from its offset on; the last column has reason and numbers."""
    has_tenants = any(row.tenant for row in numbers.requests)
    columns = [c for c in _COLUMNS if width >= c.least and (has_tenants or c.name != _TENANT)]
    table = Table(box=None, expand=True, padding=(0, 1, 0, 0), header_style="reverse", pad_edge=False)
    for column in columns:
        table.add_column(
            column.name,
            justify="right" if column.is_number else "left",
            width=column.width,
            no_wrap=True,
            overflow="ellipsis",
        )
    table.add_column(_why_title(numbers), ratio=1, no_wrap=True, overflow="ellipsis")
    ordered = sorted(numbers.requests, key=SORTS[view.sort])
    num_rows = max(1, height - 1)
    offset = min(view.offset, max(0, len(ordered) - num_rows))
    for row in ordered[offset : offset + num_rows]:
        table.add_row(*(column.cell(row) for column in columns), _why(row), style=QUEUE_COLOURS.get(row.queue, ""))
    return table


def _why_title(numbers: TopNumbers) -> str:
    num_all = len(numbers.requests) + numbers.num_left_out
    listed = f"; the oldest {len(numbers.requests):,} listed" if numbers.num_left_out else ""
    return f"why ({num_all:,} requests{listed})"


def _why(row: RequestRow) -> Text:
    return Text(reason_text(row.reason, row.numbers) if row.is_waiting else "")


def duration(seconds: float) -> str:
    """A duration in at most six characters."""
    if seconds < 100:
        return f"{seconds:.1f}s"
    if seconds < 6_000:
        return f"{int(seconds) // 60}m{int(seconds) % 60:02d}s"
    return f"{int(seconds) // 3600}h{int(seconds) % 3600 // 60:02d}m"
