"""Plot of the benchmark of worker groups: latencies as ratios, and cached prompt tokens by placement."""

from pathlib import Path
from typing import Any

_NAMES = {"ttft_p50_s": "TTFT p50", "ttft_p99_s": "TTFT p99", "tpot_p50_s": "TPOT p50", "tpot_p99_s": "TPOT p99"}


def draw(found: dict[str, Any], path: Path) -> None:
    """Draw both tables as bars."""
    # Optional backend: only plots need it.
    import matplotlib  # noqa: PLC0415

    matplotlib.use("Agg")
    from matplotlib import pyplot  # noqa: PLC0415

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(14, 5), layout="constrained")
    _latencies(left, found["latencies"])
    _hits(right, found["hits"])
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def _latencies(axis: Any, rows: list[dict[str, Any]]) -> None:
    labels = [f"{row['policy']}\n{row['workers']} workers" for row in rows]
    width = 0.8 / len(_NAMES)
    for i, (name, label) in enumerate(_NAMES.items()):
        ratios = [row["together"][name] / row["apart"][name] for row in rows]
        axis.bar([x + i * width for x in range(len(rows))], ratios, width, label=label)
    axis.axhline(1.0, color="black", lw=0.8)
    axis.set_xticks([x + 0.4 - width / 2 for x in range(len(rows))], labels, fontsize=7)
    axis.set_ylabel("one scheduler / separate ones; less is better")
    axis.set_title("Latency of chats at N times the load of one worker", fontsize=10)
    axis.set_ylim(0, 1.25)
    axis.legend(fontsize=8, loc="upper center", ncols=len(_NAMES))


def _hits(axis: Any, rows: list[dict[str, Any]]) -> None:
    labels = [f"{row['workload']}: {row['way'].replace('_', ' ')}" for row in rows][::-1]
    shares = [100 * row["hit_rate"] for row in rows][::-1]
    colors = ["#999999" if "pool" in label else "#c0504d" if "router" in label else "#4f81bd" for label in labels]
    bars = axis.barh(labels, shares, color=colors)
    axis.bar_label(bars, [f"{share:.1f} %" for share in shares], fontsize=8, padding=3)
    axis.set_xlim(0, max(shares) * 1.15)
    axis.tick_params(axis="y", labelsize=8)
    axis.set_title("Prompt tokens found in a cache, four workers", fontsize=10)
