"""A dashboard drawn by matplotlib, panels at their places, from Prometheus' answers. No picture of Grafana's, and says so."""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from tests.dashboards.asking import STEP_S, Answer

NOTE = "drawn by matplotlib from a real Prometheus' answers to this dashboard's queries, not by Grafana"
_COLUMNS, _DPI = 24, 80
_COLUMN_IN, _ROW_IN = 0.62, 0.36
_HEAD_ROWS = 2
_SECONDS = ((1.0, ""), (1e-3, "m"), (1e-6, "µ"))
_BARE = ("short", "none")
_COLOURS = {"green": "#37872d", "yellow": "#c9a200", "red": "#c4162a"}

Panels = list[tuple[dict[str, Any], list[Answer]]]


@dataclass(frozen=True, slots=True)
class When:
    """Seconds: how long it went on, and when most was to be done, which single numbers are of."""

    length_s: float
    busiest_s: float


def draw(title: str, panels: Panels, when: When, path: Path) -> None:
    """PNG; one box for each panel, where the file places it. Time in seconds."""
    num_rows = max(panel["gridPos"]["y"] + panel["gridPos"]["h"] for panel, _ in panels) + _HEAD_ROWS
    figure = Figure(figsize=(_COLUMNS * _COLUMN_IN, num_rows * _ROW_IN))
    figure.text(0.012, 1 - 0.75 / num_rows, title, fontsize=14, weight="bold", va="center")
    note = f"{NOTE}\ntimes in seconds; single numbers are those of second {when.busiest_s:.0f}"
    figure.text(0.988, 1 - 0.75 / num_rows, note, fontsize=8, va="center", ha="right", color="#666666")
    for panel, answers in panels:
        _DRAWERS[panel["type"]](_place(figure, panel, num_rows), panel, answers, when)
    figure.savefig(path, dpi=_DPI, pil_kwargs={"optimize": True})


def _place(figure: Figure, panel: dict[str, Any], num_rows: int) -> Axes:
    """Axes within the panel's cells, room for title and labels around them."""
    grid = panel["gridPos"]
    left, right = (grid["x"] + 1.5) / _COLUMNS, (grid["x"] + grid["w"] - 0.35) / _COLUMNS
    top, bottom = grid["y"] + _HEAD_ROWS + 0.8, grid["y"] + _HEAD_ROWS + grid["h"] - 0.7
    axes = figure.add_axes((left, 1 - bottom / num_rows, right - left, (bottom - top) / num_rows))
    axes.set_title(panel["title"], fontsize=9, loc="left", weight="bold", pad=4)
    axes.tick_params(labelsize=7, length=2)
    return axes


def value_text(value: float, unit: str) -> str:
    """With the unit as Grafana writes it, about."""
    if unit == "percentunit":
        return f"{value * 100:.3g} %"
    if unit == "bytes":
        return f"{value / 2**20:,.0f} MiB"
    if unit == "s":
        scale, letter = next(((s, text) for s, text in _SECONDS if abs(value) >= s), (1.0, ""))
        return f"{value / scale:.3g} {letter}s"
    number = f"{value / 1e3:.3g}k" if abs(value) >= 10_000 else f"{value:,.4g}"
    return f"{number} {'/s' if unit == 'reqps' else unit.removeprefix('suffix: ')}" if unit not in _BARE else number


def _unit(panel: dict[str, Any]) -> str:
    return str(panel["fieldConfig"]["defaults"]["unit"])


def _series(answers: list[Answer]) -> list[tuple[str, np.ndarray, np.ndarray]]:
    """(name, times, values) in Prometheus' order; those without any number left out."""
    return [
        (answer.name(labels), np.array(times), np.array(values))
        for answer in answers
        for labels, times, values in answer.series
        if not all(math.isnan(value) for value in values)
    ]


def _broken(times: np.ndarray, values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """With a gap where the series was away."""
    gaps = np.flatnonzero(np.diff(times) > 1.5 * STEP_S) + 1
    return np.insert(times, gaps, times[gaps]), np.insert(values, gaps, np.nan)


def _at(times: np.ndarray, own: np.ndarray, values: np.ndarray) -> np.ndarray:
    """The values at all times; where the series has none it is nothing."""
    found = np.zeros(len(times))
    found[np.searchsorted(times, own)] = np.nan_to_num(values)
    return found


def _lines(axes: Axes, panel: dict[str, Any], answers: list[Answer], when: "When") -> None:
    series, unit = _series(answers), _unit(panel)
    if not series:
        axes.text(0.5, 0.5, "none", ha="center", va="center", fontsize=9, color="#888888", transform=axes.transAxes)
        axes.set(xticks=[], yticks=[])
        return
    is_stacked = panel["fieldConfig"]["defaults"]["custom"]["stacking"]["mode"] == "normal"
    if is_stacked:
        times = np.unique(np.concatenate([t for _, t, _ in series]))
        rows = [_at(times, t, v) for _, t, v in series]
        axes.stackplot(times, rows, labels=[name for name, _, _ in series], alpha=0.75, linewidth=0, step="mid")
    else:
        for name, times, values in series:
            axes.plot(*_broken(times, values), label=name, linewidth=1.1)
    axes.set_ylim(0, panel["fieldConfig"]["defaults"].get("max") or axes.get_ylim()[1] * 1.15 or 1.0)
    axes.set_xlim(0, when.length_s)
    axes.yaxis.set_major_formatter(lambda value, _: value_text(value, unit))
    axes.yaxis.set_major_locator(MaxNLocator(4))
    axes.grid(alpha=0.25)
    if any(name for name, _, _ in series):
        axes.legend(fontsize=6.5, loc="upper left", ncols=2, framealpha=0.6, handlelength=1, borderpad=0.3)


def _number(axes: Axes, panel: dict[str, Any], answers: list[Answer], when: "When") -> None:
    """The value at the busiest moment."""
    axes.set_axis_off()
    defaults = panel["fieldConfig"]["defaults"]
    values = [v[np.searchsorted(t, when.busiest_s).clip(max=len(v) - 1)] for _, t, v in _series(answers)]
    if not values:
        axes.text(0.5, 0.5, "none", ha="center", va="center", fontsize=16, color="#888888")
        return
    words = {v: found["text"] for m in defaults.get("mappings", []) for v, found in m["options"].items()}
    text = words.get(f"{values[0]:g}", value_text(values[0], defaults["unit"]))
    reached = [
        step["color"] for step in defaults["thresholds"]["steps"] if step["value"] is None or values[0] >= step["value"]
    ]
    axes.text(0.5, 0.45, text, ha="center", va="center", fontsize=18, color=_COLOURS[reached[-1]], weight="bold")


def _heat(axes: Axes, panel: dict[str, Any], answers: list[Answer], when: "When") -> None:
    """Counts of each bucket: the cumulative ones less those below."""
    found = sorted(
        ((float(labels["le"]), times, values) for answer in answers for labels, times, values in answer.series),
        key=lambda item: item[0],
    )
    if not found:
        axes.text(0.5, 0.5, "none", ha="center", va="center", fontsize=9, color="#888888", transform=axes.transAxes)
        return
    times = np.array(max((times for _, times, _ in found), key=len))
    total = np.nan_to_num(np.array([np.interp(times, t, np.nan_to_num(v), left=0) for _, t, v in found]))
    counts = np.diff(total, axis=0, prepend=0).clip(min=0)
    used = np.flatnonzero(counts.sum(axis=1) > 0)
    rows = slice(max(0, used[0] - 1), used[-1] + 2) if len(used) else slice(0, 1)
    labels = [value_text(bound, "s") if math.isfinite(bound) else "more" for bound, _, _ in found][rows]
    shown = np.where(counts[rows] > 0, counts[rows], np.nan)
    axes.imshow(
        np.sqrt(shown), aspect="auto", origin="lower", cmap="Oranges", vmin=0, interpolation="nearest",
        extent=(times[0], times[-1], -0.5, len(labels) - 0.5),
    )  # fmt: skip
    axes.set_xlim(0, when.length_s)
    every = max(1, len(labels) // 6)
    axes.set_yticks(range(0, len(labels), every), labels[::every])


_DRAWERS = {"timeseries": _lines, "stat": _number, "heatmap": _heat}
