"""Results of runs as tables, and as a plot if matplotlib is installed. Their definitions: quire_tools.bench.measure."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from quire_tools.bench.measure import Record

_QUANTILES = ("mean", "p50", "p90", "p99", "max")
_TIMES = {
    "TTFT (first token)": "ttft_ms",
    "TPOT (per token)": "tpot_ms",
    "ITL (between)": "itl_ms",
    "E2E latency": "latency_ms",
    "client was late by": "client_lag_ms",
}


def print_table(summaries: Mapping[str, Mapping[str, Any]], console: Console) -> None:
    """Print one column per workload; times as p50 / p99 in milliseconds."""
    table = Table("", *summaries, title="times: p50 / p99 in ms", title_justify="left")
    for label, cell in _ROWS.items():
        table.add_row(label, *(cell(summary) for summary in summaries.values()))
    console.print(table)
    for name, summary in summaries.items():
        for error, count in summary["errors"].items():
            console.print(f"{name}: {count} x {error}", markup=False)


def _p50_p99(quantiles: Mapping[str, float]) -> str:
    return f"{quantiles['p50']:,.1f} / {quantiles['p99']:,.1f}" if quantiles else "-"


_ROWS: dict[str, Callable[[Mapping[str, Any]], str]] = {
    "requests (failed)": lambda s: f"{s['requests']} ({s['failed']})",
    "tokens/s": lambda s: f"{s['output_tokens_per_s']:,.1f}",
    "requests/s": lambda s: f"{s['requests_per_s']:,.2f}",
    "TTFT": lambda s: _p50_p99(s["ttft_ms"]),
    "TPOT": lambda s: _p50_p99(s["tpot_ms"]),
    "ITL": lambda s: _p50_p99(s["itl_ms"]),
    "latency": lambda s: _p50_p99(s["latency_ms"]),
    "cached prompt tokens": lambda s: f"{s['cached_prompt_tokens']} of {s['prompt_tokens']}",
}


def print_percentiles(summary: Mapping[str, Any], console: Console) -> None:
    """Print one run: a table of times in milliseconds, then throughput and errors."""
    table = Table("ms", *_QUANTILES)
    for column in table.columns[1:]:
        column.justify = "right"
    for label, key in _TIMES.items():
        values = summary[key]
        table.add_row(label, *(f"{values[name]:,.1f}" if values else "-" for name in _QUANTILES))
    console.print(table)
    console.print(
        f"{summary['requests']} requests in {summary['duration_s']:.2f} s, {summary['failed']} failed: "
        f"{summary['requests_per_s']:,.2f} requests/s, {summary['output_tokens_per_s']:,.1f} output tokens/s, "
        f"{summary['total_tokens_per_s']:,.1f} tokens/s with prompts",
        highlight=False,
        soft_wrap=True,
    )
    console.print(
        f"prompts: {summary['prompt_tokens']} tokens, {summary['cached_prompt_tokens']} of them from the prefix cache",
        highlight=False,
    )
    for error, count in summary["errors"].items():
        console.print(f"failed: {count} x {error}", markup=False, highlight=False)


def plot(runs: Mapping[str, list[Record]], path: Path) -> None:
    """Plot one row per workload: distributions of TTFT and of gaps between tokens, and tokens per second over time."""
    # Optional package, needed for plots only.
    import matplotlib  # noqa: PLC0415

    matplotlib.use("Agg")
    from matplotlib import pyplot  # noqa: PLC0415

    figure, axes = pyplot.subplots(len(runs), 3, figsize=(12, 2.8 * len(runs)), squeeze=False, layout="constrained")
    for row, (name, records) in zip(axes, runs.items(), strict=True):
        good = [record for record in records if not record.error]
        _shares(row[0], [r.ttft_s * 1e3 for r in good], f"{name}: TTFT, ms")
        _shares(row[1], [gap * 1e3 for r in good for gap in r.itl_s], f"{name}: gaps between tokens (ITL), ms")
        _over_time(row[2], good, f"{name}: tokens/s over time, s")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def _shares(axis: Any, values: list[float], title: str) -> None:
    if values:
        axis.plot(np.sort(values), np.arange(1, len(values) + 1) / len(values))
    axis.set(title=title, ylim=(0, 1.02), xlim=(0, None), ylabel="share")
    axis.grid(alpha=0.3)


def _over_time(axis: Any, records: list[Record], title: str) -> None:
    ends = max((record.ended_s for record in records), default=1.0)
    bins = np.linspace(0.0, max(ends, 1e-3), 41)
    counts = np.zeros(len(bins) - 1)
    for record in records:
        if record.token_times_s:
            weight = record.output_tokens / len(record.token_times_s)
            counts += np.histogram(record.token_times_s, bins)[0] * weight
    axis.step(bins[:-1], counts / np.diff(bins), where="post")
    axis.set(title=title, xlim=(0, None), ylim=(0, None))
    axis.grid(alpha=0.3)
