"""Plot of a result: each engine's share of the limit, Quire's ratio to each peer, and the spread over rounds."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.compare import figures
from benchmarks.compare.engines.registry import is_quire
from benchmarks.compare.figures import THROUGHPUT, Spread

_BAR = 0.8


def draw(result: Mapping[str, Any], path: Path) -> None:
    """Draw a PNG, PDF or SVG, by the file name."""
    # Optional backend: only plots need it.
    import matplotlib  # noqa: PLC0415

    matplotlib.use("Agg")
    from matplotlib import pyplot  # noqa: PLC0415

    figure, (above, below) = pyplot.subplots(2, 1, figsize=(11, 8), layout="constrained")
    _shares(above, result)
    _ratios(below, result)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def _shares(axis: Any, result: Mapping[str, Any]) -> None:
    limits = {name: limit for name, limit in result["limits"]["tokens_per_s"].items() if limit}
    groups = {
        engine: {
            workload: _scaled(figures.spread(result["runs"], workload, engine, THROUGHPUT), limit)
            for workload, limit in limits.items()
        }
        for engine in figures.names(result["runs"], "engine")
    }
    _bars(axis, list(limits), groups, _colors(result))
    axis.axhline(1.0, color="black", linewidth=0.8)
    axis.set_title(f"{result['model']}: output tokens/s as a share of what memory and matrix units allow", fontsize=10)


def _ratios(axis: Any, result: Mapping[str, Any]) -> None:
    rows, ours = result["runs"], result["ours"]
    workloads = figures.names(rows, "workload")
    peers = [engine for engine in figures.names(rows, "engine") if not is_quire(engine)]
    groups = {peer: {w: figures.ratio(rows, w, THROUGHPUT, ours, peer) for w in workloads} for peer in peers}
    _bars(axis, workloads, groups, _colors(result))
    axis.axhline(1.0, color="black", linewidth=0.8)
    axis.set_yscale("log")
    axis.yaxis.set_major_formatter("{x:g}")
    axis.yaxis.set_minor_formatter("{x:g}")
    axis.set_title(
        "output tokens/s of Quire's full stack / the peer's (median, least to most over rounds)", fontsize=10
    )


def _colors(result: Mapping[str, Any]) -> dict[str, str]:
    """One colour per engine, the same in both halves."""
    return {engine: f"C{i % 10}" for i, engine in enumerate(figures.names(result["runs"], "engine"))}


def _scaled(one: Spread | None, limit: float) -> Spread | None:
    return None if one is None else Spread(one.median / limit, one.least / limit, one.most / limit)


def _bars(
    axis: Any, workloads: list[str], groups: Mapping[str, Mapping[str, Spread | None]], colors: Mapping[str, str]
) -> None:
    width = _BAR / max(1, len(groups))
    for i, (engine, found) in enumerate(groups.items()):
        known = [(x + i * width, one) for x, w in enumerate(workloads) if (one := found.get(w)) is not None]
        if not known:
            continue
        errors = [[one.median - one.least for _, one in known], [one.most - one.median for _, one in known]]
        places, medians = [x for x, _ in known], [one.median for _, one in known]
        look = {"label": engine, "color": colors[engine], "error_kw": {"linewidth": 0.8}}
        bars = axis.bar(places, medians, width * 0.95, yerr=errors, **look)
        axis.bar_label(bars, fmt="%.2f", fontsize=6, padding=2)
    axis.set_xticks([x + _BAR / 2 - width / 2 for x in range(len(workloads))], workloads)
    if groups:
        axis.legend(fontsize=8, ncols=5)
