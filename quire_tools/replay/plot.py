"""The plot of `quire replay --plot`: recorded beside what-if. Needs matplotlib, which only this module imports."""

from collections.abc import Callable
from pathlib import Path

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from quire_tools.replay.what_if import WhatIf
from quire_tools.simulation.history import RequestHistory, SimulationHistory
from svc_common.errors import ConfigError

_BARS = (("preemptions", "num_preemptions"), ("lost tokens", "num_lost_tokens"), ("fairness (Jain)", "fairness"))
_COLOURS = ("#7f7f7f", "#1f77b4")


def save(path: Path, found: WhatIf, title: str) -> None:
    """Write the plot in the format of the file's suffix. Raises ConfigError on failure."""
    names = ("recorded", title)
    histories = (found.recorded, found.predicted)
    with mpl.rc_context({"svg.hashsalt": "quire"}):
        figure = Figure(figsize=(11, 6.5), layout="constrained")
        axes = figure.subplot_mosaic(
            [["ttft", "ttft", "ttft", "tpot", "tpot", "tpot"], ["b0", "b0", "b1", "b1", "b2", "b2"]]
        )
        _distribution(axes["ttft"], "TTFT, ms", lambda r: r.ttft_s, names, histories)
        _distribution(axes["tpot"], "TPOT, ms", lambda r: r.tpot_s, names, histories)
        for i, (name, key) in enumerate(_BARS):
            axes[f"b{i}"].bar(names, [float(getattr(h.figures(), key)) for h in histories], color=_COLOURS)
            axes[f"b{i}"].set_title(name)
        figure.suptitle(
            f"{found.num_requests:,} requests, from step {found.from_step}, fit error {found.fit.error:.1%}"
        )
        try:
            figure.savefig(path)
        except (OSError, ValueError) as error:
            raise ConfigError(f"--plot {path}: cannot be written: {error}", reason="PLOT_FILE") from None


def _distribution(
    axes: Axes,
    title: str,
    value: Callable[[RequestHistory], float | None],
    names: tuple[str, str],
    histories: tuple[SimulationHistory, SimulationHistory],
) -> None:
    """Draw the share of requests with at most each value (a CDF)."""
    for name, history, colour in zip(names, histories, _COLOURS, strict=True):
        values = sorted(1e3 * v for r in history.requests.values() if (v := value(r)) is not None)
        shares = [(i + 1) / len(values) for i in range(len(values))]
        axes.step(values, shares, where="post", label=name, color=colour)
    axes.set_title(title)
    axes.set_ylabel("share of requests")
    axes.legend()
