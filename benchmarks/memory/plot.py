"""Plot of the memory benchmark: memory held over time, with paging and without."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.memory.runs import serve_contiguous, serve_paged
from benchmarks.memory.workloads import Workload, setting_of

_COLOURS = {
    "tokens": "#2166ac",
    "last blocks": "#d6604d",
    "used": "#2166ac",
    "reserved": "#92c5de",
    "internal": "#d6604d",
    "external": "#bbbbbb",
}


def draw(
    workloads: list[Workload], n: int, num_requests: int, seed: int, path: Path, *, tick: Callable[[], None]
) -> None:
    """Draw one row per workload: paged memory, contiguous memory, requests done. x: steps until the slower one is done.

    `tick` is called after each row.
    """
    # Optional backend: only plots need it.
    import matplotlib  # noqa: PLC0415

    matplotlib.use("Agg")
    from matplotlib import pyplot  # noqa: PLC0415

    size = (13, 3.1 * len(workloads))
    plots, axes = pyplot.subplots(len(workloads), 3, figsize=size, squeeze=False, layout="constrained")
    for row, workload in zip(axes, workloads, strict=True):
        _row(row, workload, n, num_requests, seed)
        tick()
    path.parent.mkdir(parents=True, exist_ok=True)
    plots.savefig(path, dpi=110)
    pyplot.close(plots)


def _row(row: Any, workload: Workload, n: int, num_requests: int, seed: int) -> None:
    jobs, setting = workload.jobs(num_requests, seed), setting_of(workload, n, seed)
    moments, rows = list(serve_paged(jobs, setting)), list(serve_contiguous(jobs, setting))
    title = f"{workload.name}, {workload.kind.value}, n = {n}"
    held = [m.memory.physical_blocks * setting.block_size for m in moments]
    wasted = [m.memory.waste_tokens for m in moments]
    paged = {"tokens": [a - b for a, b in zip(held, wasted, strict=True)], "last blocks": wasted}
    _stack(row[0], paged, setting.num_slots, f"{title}: paged, slots")
    row[0].plot([m.memory.num_tokens for m in moments], color="black", lw=0.8, ls=":", label="without sharing")
    row[0].legend(fontsize=7, loc="upper right")
    parts = {
        name: [getattr(memory, name) for memory, _ in rows] for name in ("used", "reserved", "internal", "external")
    }
    _stack(row[1], parts, setting.num_slots, "contiguous, slots")
    row[1].legend(fontsize=7, loc="upper right")
    row[2].plot([m.num_running for m in moments], label="paged")
    row[2].plot([running for _, running in rows], label="contiguous")
    row[2].set(title="running requests", ylim=(0, None))
    row[2].legend(fontsize=7)
    for axis in row:
        axis.set(xlim=(0, max(len(rows), len(moments))), xlabel="step")
        axis.title.set_fontsize(9)
        axis.grid(alpha=0.3)


def _stack(axis: Any, parts: dict[str, list[int]], num_slots: int, title: str) -> None:
    steps = range(len(next(iter(parts.values()))))
    axis.stackplot(steps, *parts.values(), labels=list(parts), colors=[_COLOURS[name] for name in parts], lw=0)
    axis.set(title=title, ylim=(0, num_slots * 1.02))
