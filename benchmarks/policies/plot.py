"""Plot of the policy comparison: shares of requests by latency, one row per workload."""

from pathlib import Path
from typing import Any

import numpy as np

from quire_tools.simulation.history import SimulationHistory

_WINDOW_S = 5.0


def draw(runs: dict[str, dict[str, SimulationHistory]], path: Path) -> None:
    """Draw TTFT and TPOT as cumulated shares of requests, throughput over time and lost tokens as bars."""
    # Optional backend: only plots need it.
    import matplotlib  # noqa: PLC0415

    matplotlib.use("Agg")
    from matplotlib import pyplot  # noqa: PLC0415

    size = (15, 3.1 * len(runs))
    figure, axes = pyplot.subplots(len(runs), 4, figsize=size, squeeze=False, layout="constrained")
    for row, (kind, of_kind) in zip(axes, runs.items(), strict=True):
        _latencies(row[0], row[1], of_kind)
        _throughput(row[2], of_kind)
        _lost(row[3], of_kind)
        row[0].set_title(f"{kind}: time to first token, s", fontsize=9)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def _latencies(first: Any, between: Any, runs: dict[str, SimulationHistory]) -> None:
    for name, history in runs.items():
        ttft = [r.ttft_s for r in history.requests.values() if r.ttft_s is not None]
        tpot = [r.tpot_s * 1e3 for r in history.requests.values() if r.tpot_s is not None]
        for axis, values in ((first, ttft), (between, tpot)):
            axis.plot(np.sort(values), np.arange(1, len(values) + 1) / len(values), label=name, lw=1.2)
    first.set(xscale="log", ylim=(0, 1.02), ylabel="share of requests")
    between.set(ylim=(0, 1.02))
    between.set_title("time per output token, ms", fontsize=9)
    first.legend(fontsize=7)
    for axis in (first, between):
        axis.grid(alpha=0.3)


def _throughput(axis: Any, runs: dict[str, SimulationHistory]) -> None:
    start = min((r.arrival_s for history in runs.values() for r in history.requests.values()), default=0.0)
    for name, history in runs.items():
        times = (
            np.concatenate([np.asarray(r.token_times_s) for r in history.requests.values()] or [np.zeros(0)]) - start
        )
        edges = np.arange(0.0, max(times.max(initial=0.0), _WINDOW_S) + _WINDOW_S, _WINDOW_S)
        axis.plot(edges[:-1], np.histogram(times, edges)[0] / _WINDOW_S, label=name, lw=1.0)
    axis.set(ylim=(0, None), xlabel="s")
    axis.set_title(f"tokens/s, in windows of {_WINDOW_S:g} s", fontsize=9)
    axis.grid(alpha=0.3)


def _lost(axis: Any, runs: dict[str, SimulationHistory]) -> None:
    shares = [100 * f.num_lost_tokens / max(1, f.num_computed_tokens) for f in (h.figures() for h in runs.values())]
    axis.barh(list(runs), shares, color=[f"C{number}" for number in range(len(shares))])
    axis.invert_yaxis()
    axis.set_title("lost tokens, % of computed ones", fontsize=9)
    axis.tick_params(labelsize=7)
    axis.grid(alpha=0.3, axis="x")
