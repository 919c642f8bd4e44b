"""Samples of memory, descriptors and threads of processes, a straight line through them, and whether it rises."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import psutil

QUANTITIES = {"rss_kib": 100.0, "descriptors": 0.5, "threads": 0.2}
"""Sampled quantities, with the rise per 1,000 requests above which they count as growing."""
_SURE = 3.0
"""A rise of fewer standard errors may be chance."""


@dataclass(slots=True)
class Samples:
    """Samples of some processes. `pids`: by name. `requests`: number of completed requests at each sample."""

    pids: Mapping[str, int]
    requests: list[int] = field(default_factory=list)
    values: dict[str, dict[str, list[float]]] = field(default_factory=dict)

    def take(self, num_requests: int) -> None:
        """Sample all processes now."""
        self.requests.append(num_requests)
        for name, pid in self.pids.items():
            process = psutil.Process(pid)
            with process.oneshot():
                read = (process.memory_info().rss / 1024, process.num_fds(), process.num_threads())
            of_process = self.values.setdefault(name, {quantity: [] for quantity in QUANTITIES})
            for quantity, value in zip(QUANTITIES, read, strict=True):
                of_process[quantity].append(value)

    def lines(self) -> dict[str, dict[str, dict[str, Any]]]:
        """The fitted lines by process and quantity: see `line`."""
        return {
            name: {q: line(self.requests, values, QUANTITIES[q]) for q, values in of_process.items()}
            for name, of_process in self.values.items()
        }


def line(requests: Sequence[int], values: Sequence[float], least: float) -> dict[str, Any]:
    """Fit a line and decide whether the quantity grows: by more than `least` and by more than chance.

    Returns first and last value, the line's rise per 1,000 requests and its standard error. Needs at least
    three values.
    """
    x = np.asarray(requests, float) / 1_000
    y = np.asarray(values, float)
    slope, start = np.polyfit(x, y, 1)
    rest = y - (slope * x + start)
    error = float(np.sqrt(rest @ rest / (len(x) - 2) / ((x - x.mean()) @ (x - x.mean()))))
    return {
        "first": round(float(y[0]), 1),
        "last": round(float(y[-1]), 1),
        "per_1000": round(float(slope), 3),
        "error": round(error, 3),
        "grows": bool(slope > least and slope > _SURE * error),
    }


def draw(runs: Mapping[str, Samples], path: Path) -> None:
    """Plot memory of each process over requests, one row per run; PNG, PDF or SVG."""
    # Optional backend: only plots need it.
    import matplotlib  # noqa: PLC0415

    matplotlib.use("Agg")
    from matplotlib import pyplot  # noqa: PLC0415

    width = max(len(samples.pids) for samples in runs.values())
    figure, axes = pyplot.subplots(
        len(runs), width, figsize=(4 * width, 2.6 * len(runs)), squeeze=False, layout="constrained"
    )
    for row, (run, samples) in zip(axes, runs.items(), strict=True):
        for axis, (name, of_process) in zip(row, samples.values.items(), strict=True):
            axis.plot(samples.requests, np.asarray(of_process["rss_kib"]) / 1024)
            axis.set_ylim(0, 1.15 * max(of_process["rss_kib"]) / 1024)
            axis.set_title(f"{run}: {name}, resident MiB over requests", fontsize=9)
            axis.grid(alpha=0.3)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
