"""The boxes of the screen, each a pure function of the numbers and its size."""

from collections.abc import Sequence
from dataclasses import dataclass

from rich import box
from rich.align import Align
from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from quire_tools.top import bars
from quire_tools.top.numbers import PoolNumbers, TopNumbers, WaitNumbers
from quire_tools.top.steps import PARTS, StepFigures

Drawn = RenderableType
QUEUE_COLOURS = {"running": "green", "waiting": "yellow", "swapped": "magenta"}
_PART_COLOURS = ("blue", "bright_black", "magenta", "cyan", "green", "yellow", "white")
_USED, _CACHED, _FREE = "green", "cyan", "bright_black"
_FRAME = 4
_DEFAULT_TENANT = "(default)"
_MOST_DETAILS = 6
_LEAST_SHARE = 0.005


@dataclass(frozen=True, slots=True)
class Detail:
    """A box shown only on large terminals; `height` includes its frame, `ratio` is its relative width."""

    panel: Panel
    height: int
    ratio: int


def _panel(content: Drawn, title: str, note: str = "") -> Panel:
    text = Text(title, style="bold")
    if note:
        text.append(f"  {note}", style="not bold")
    return Panel(content, title=text, title_align="left", box=box.ROUNDED, border_style="bright_black")


def _lines(lines: Sequence[Text]) -> Group:
    for line in lines:
        line.no_wrap, line.overflow = True, "ellipsis"
    return Group(*lines)


def nothing_yet(text: str) -> Drawn:
    """Shown instead of boxes while there are no numbers."""
    return Align.center(Text(text, justify="center"), vertical="middle")


# --- queues and pools -------------------------------------------------------------------------------------------------


def queues(numbers: TopNumbers, width: int) -> Panel:
    """Running, waiting and swapped requests as bars of one scale, and throughput."""
    counts = {"running": numbers.running, "waiting": numbers.waiting, "swapped": numbers.swapped}
    most, room = max(1, *counts.values()), width - _FRAME - 15
    lines = [
        Text(f"{name:<8}{count:>6,} ").append_text(bars.filled(count, most, room, QUEUE_COLOURS[name]))
        for name, count in counts.items()
    ]
    steps = numbers.steps
    lines.append(
        Text("tokens/s  ")
        .append(f"{steps.prompt_tokens_per_s:,.0f}", style="bold")
        .append(" prompt  ")
        .append(f"{numbers.output_tokens_per_s:,.0f}", style="bold")
        .append(" out")
    )
    room_for = "" if numbers.max_waiting is None else f" of {numbers.max_waiting:,}"
    return _panel(_lines(lines), "requests", f"{numbers.never_scheduled:,}{room_for} waiting to start")


def pools(numbers: TopNumbers, width: int) -> Panel:
    """One bar of blocks per pool, and the prefix-cache hit rate."""
    lines = [line for pool in numbers.pools for line in _pool(pool, width - _FRAME)]
    if not numbers.pools:
        lines = [Text("no worker has reported its blocks yet")]
    lines.append(_prefixes(numbers))
    legend = Text("blocks", style="bold")
    for character, style, name in (
        (bars.FULL, _USED, "used"),
        (bars.HALF, _CACHED, "cached"),
        (bars.EMPTY, _FREE, "free"),
    ):
        legend.append(f"  {character}", style=f"not bold {style}").append(f" {name}", style="not bold")
    return Panel(_lines(lines), title=legend, title_align="left", box=box.ROUNDED, border_style="bright_black")


def _pool(pool: PoolNumbers, width: int) -> list[Text]:
    """Two lines for the device pool, one for the host pool."""
    parts = ((pool.used, bars.FULL, _USED), (pool.cached, bars.HALF, _CACHED), (pool.free, bars.EMPTY, _FREE))
    label = Text(f"{pool.tier:<7}")
    if pool.tier == "host":
        counts = Text(f" {pool.used:,} of {pool.total:,}")
        return [label.append_text(bars.stacked(parts, width - len(label) - len(counts))).append_text(counts)]
    share = Text(f"{pool.used / pool.total if pool.total else 0:>5.0%}", style="bold")
    words = Text(f"       {pool.used:,} used  {pool.cached:,} cached  {pool.free:,} free")
    return [label.append_text(bars.stacked(parts, width - len(label) - len(share))).append_text(share), words]


def _prefixes(numbers: TopNumbers) -> Text:
    rate = numbers.prefixes.hit_rate
    if rate is None:
        return Text("prefix  hits: unknown yet", style="bright_black")
    return Text("prefix  ").append(f"{rate:.0%}", style="bold").append(" of prompt tokens cached")


# --- reasons and steps ------------------------------------------------------------------------------------------------


def why(numbers: TopNumbers, width: int, height: int) -> Panel:
    """Waiting reasons by frequency, and the most frequent one in words."""
    if not numbers.waits:
        return _panel(Text("no request waits", style="green"), "why they wait")
    num_words = 2 + max(0, height - 7) // 3
    num_lines = max(1, height - 2 - num_words)
    most, room = numbers.waits[0].num_requests, max(4, width - _FRAME - 24)
    lines = [_wait(wait, most, room) for wait in numbers.waits[:num_lines]]
    if len(numbers.waits) > num_lines:
        rest = sum(wait.num_requests for wait in numbers.waits[num_lines - 1 :])
        lines[-1] = Text(f"{rest:>6,} for {len(numbers.waits) - num_lines + 1} other reasons", style="bright_black")
    return _panel(Group(_lines(lines), Text(numbers.waits[0].words, style="italic")), "why they wait")


def _wait(wait: WaitNumbers, most: int, room: int) -> Text:
    colour = QUEUE_COLOURS.get(wait.queue, "white")
    line = Text(f"{wait.num_requests:>6,} ").append(f"{wait.reason:<16} ", style=colour)
    return line.append_text(bars.filled(wait.num_requests, most, room, colour))


def steps(numbers: TopNumbers, width: int, height: int) -> Panel:
    """Step times: a chart of the last ones, percentiles, and shares of each part."""
    figures, room = numbers.steps, width - _FRAME
    if figures.p50_ms is None:
        return _panel(Text("no step yet"), "steps")
    parts = [(figures.shares[part], bars.FULL, colour) for part, colour in zip(PARTS, _PART_COLOURS, strict=True)]
    words = [
        Text(f"p50 {_short(figures.p50_ms)} p99 {_short(figures.p99_ms)} ms  {_short(figures.steps_per_s)} steps/s"),
        bars.stacked(parts, room),
        *_shares(figures, room),
        _counts(figures),
    ]
    graph = bars.columns(figures.durations_ms, room, max(1, height - 2 - len(words)))
    lines = [*(Text(line, style="green") for line in graph), *words]
    lost = f", preempted {figures.num_preempted:,}" if figures.num_preempted else ", time at the worker"
    return _panel(_lines(lines[: height - 2]), "steps", f"last {figures.num_steps:,}{lost}")


def _short(value: float | None) -> str:
    return (
        "-" if value is None else f"{value:,.2f}" if value < 10 else f"{value:,.1f}" if value < 100 else f"{value:,.0f}"
    )


def _shares(figures: StepFigures, room: int) -> list[Text]:
    """Names of the parts in their colours, as many per line as fit."""
    lines = [Text()]
    for part, colour in zip(PARTS, _PART_COLOURS, strict=True):
        if figures.shares[part] < _LEAST_SHARE:
            continue
        item = Text(bars.FULL, style=colour).append(f"{part} {figures.shares[part]:.0%} ", style="default")
        if len(lines[-1]) + len(item) > room:
            lines.append(Text())
        lines[-1].append_text(item)
    return lines


def _counts(figures: StepFigures) -> Text:
    """Counts of failed steps and moved blocks, the mean step size, and the share of steps repeated by grants."""
    counts = [
        (figures.num_failed, f"{figures.num_failed:,} failed", "bold red"),
        (figures.blocks_moved, f"{figures.blocks_moved:,} blocks moved", ""),
        (1, f"{figures.requests_per_step:.1f} requests a step", ""),
        (figures.num_repeated, f"{figures.num_repeated / max(1, figures.num_steps):.0%} repeated by grants", ""),
    ]
    return Text("  ").join(Text(text, style=style) for count, text, style in counts if count)


# --- what large terminals have ----------------------------------------------------------------------------------------


def details(numbers: TopNumbers) -> list[Detail]:
    """Workers if known, and tenants if there are others than the default one."""
    found = [] if not numbers.workers else [_detail(_workers(numbers), "workers", len(numbers.workers), 2)]
    if any(tenant.name for tenant in numbers.tenants):
        found.append(_detail(_tenants(numbers), "tenants", len(numbers.tenants), 1))
    return found


def _detail(table: Table, title: str, num_rows: int, ratio: int) -> Detail:
    return Detail(_panel(table, title), min(num_rows, _MOST_DETAILS) + 3, ratio)


def _workers(numbers: TopNumbers) -> Table:
    table = _plain_table("lane", "address", "state", "model", ">epoch", ">blocks")
    for worker in numbers.workers[:_MOST_DETAILS]:
        state = Text("ready", style="green") if worker.ready else Text(worker.problem, style="bold red")
        known = (worker.model, str(worker.epoch or ""), f"{worker.num_gpu_blocks:,}") if worker.model else ("", "", "")
        table.add_row(str(worker.lane), worker.address, state, *known)
    return table


def _tenants(numbers: TopNumbers) -> Table:
    table = _plain_table("tenant", ">waiting", ">running")
    busiest = sorted(numbers.tenants, key=lambda tenant: (-tenant.waiting - tenant.running, tenant.name))
    for tenant in busiest[:_MOST_DETAILS]:
        table.add_row(tenant.name or _DEFAULT_TENANT, f"{tenant.waiting:,}", f"{tenant.running:,}")
    return table


def _plain_table(*names: str) -> Table:
    """A table without lines; names that begin with ">" are right-aligned columns of numbers."""
    table = Table(box=None, padding=(0, 2, 0, 0), expand=False, header_style="bright_black")
    for name in names:
        right = name.startswith(">")
        table.add_column(name.lstrip(">"), justify="right" if right else "left", no_wrap=True, overflow="ellipsis")
    return table
