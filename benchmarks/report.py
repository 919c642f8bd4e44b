"""What comes out: the machine and the versions behind a figure, files in benchmarks/results/, tables and plots."""

import importlib.metadata
import json
import os
import platform
import subprocess
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks.measure import Record

RESULTS = Path(__file__).resolve().parent / "results"
_PACKAGES = ("quire", "grpcio", "protobuf", "torch", "triton", "transformers", "numpy", "httpx")


def provenance() -> dict[str, Any]:
    """Machine, versions and commit: without these a figure says nothing."""
    return {
        "when": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": {
            "cpu": _cpu_name(),
            "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
            "load_average_1min": round(os.getloadavg()[0], 2),
            "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        },
        "versions": {"python": platform.python_version(), **_versions()},
        "commit": _commit(),
    }


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "unknown")


def _versions() -> dict[str, str]:
    installed = {}
    for name in _PACKAGES:
        try:
            installed[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return installed


def _commit() -> str:
    git = ["git", "-C", str(RESULTS), "describe", "--always", "--dirty", "--abbrev=12"]
    try:
        return subprocess.run(git, capture_output=True, text=True, check=True, timeout=10).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return "unknown"


def save(name: str, content: Mapping[str, Any], out: Path | None = None) -> Path:
    """Writes `content` with its provenance as JSON; to benchmarks/results/NAME.json unless `out` says where."""
    path = out or RESULTS / f"{name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({**provenance(), **content}, indent=2) + "\n", encoding="utf-8")
    return path


def print_table(summaries: Mapping[str, Mapping[str, Any]], console: Console) -> None:
    """One column per workload; times as p50 / p99 in milliseconds."""
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


def plot(runs: Mapping[str, list[Record]], path: Path) -> None:
    """One row per workload: shares of TTFT, of gaps between tokens, and tokens per second over time."""
    # Optional backend: only plots need it.
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
