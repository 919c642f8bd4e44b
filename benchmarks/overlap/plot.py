"""Plot of overlap: a worker's activity over a few steps, one lane with overlap and one without; a row per worker."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.overlap.stack import Run

_NUM_STEPS = 5
_STEP, _NEXT, _GAP = "C0", "#7fb3d9", "C3"


def draw(runs: Mapping[str, Mapping[str, Run]], path: Path) -> None:
    """`runs`: by worker, then by lane ("overlap", "no overlap"). Steps in two blues, gaps in red; PNG, PDF or SVG."""
    # Optional backend: only plots need it.
    import matplotlib  # noqa: PLC0415

    matplotlib.use("Agg")
    from matplotlib import pyplot  # noqa: PLC0415

    figure, axes = pyplot.subplots(len(runs), 1, figsize=(10, 1.5 * len(runs)), squeeze=False, layout="constrained")
    for axis, (name, lanes) in zip(axes[:, 0], runs.items(), strict=True):
        for y, run in enumerate(lanes.values()):
            _lane(axis, y, run)
        axis.set_yticks(range(len(lanes)), list(lanes))
        axis.set_ylim(len(lanes) - 0.5, -0.5)
        axis.set_title(
            f"{name}: {_NUM_STEPS} steps at the worker (blue) and the gaps between them (red), ms", fontsize=9
        )
        axis.tick_params(labelsize=8)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def _lane(axis: Any, y: int, run: Run) -> None:
    """Draw steps from the middle of the run, the first starting at 0."""
    middle = max(0, (len(run.steps) - _NUM_STEPS) // 2)
    steps = (run.steps[middle : middle + _NUM_STEPS + 1] - run.steps[middle, 0]) / 1e6
    bars = [(began, ended - began) for began, ended in steps]
    axis.broken_barh(bars[:_NUM_STEPS:2], (y - 0.3, 0.6), color=_STEP)
    axis.broken_barh(bars[1:_NUM_STEPS:2], (y - 0.3, 0.6), color=_NEXT)
    gaps = [(steps[i, 1], max(0.0, steps[i + 1, 0] - steps[i, 1])) for i in range(len(steps) - 1)]
    axis.broken_barh(gaps, (y - 0.3, 0.6), color=_GAP)
