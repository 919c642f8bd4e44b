"""Measures how long the worker idles between steps, with the next step planned ahead (overlap) and without.

    python -m benchmarks.overlap --save --plot benchmarks/results/overlap.png    # all, under four minutes
    python -m benchmarks.overlap --pairs 1 --seconds 1 --workers 10ms,tiny       # a short run

This module holds the command line and its table. Processes and figures of a run: benchmarks.overlap.stack.
"""

import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from benchmarks import command_line, report
from benchmarks.overlap import plot as overlap_plot
from benchmarks.overlap.stack import Run, TimedStack

LANES = {"overlap": True, "no overlap": False}
TINY = Path(__file__).resolve().parents[2] / "models" / "tiny"
_STEP_S = {"5ms": 0.005, "10ms": 0.01, "25ms": 0.025, "tiny": 0.01, "79M": 0.04}
_LEAST_STEPS = 40
_MODEL_LIMIT_S = 120
Runs = dict[str, dict[str, list[Run]]]

_HELP_END = """
Three processes and this client. The worker reads the clock before and after each step; the gap is the time from the end of a step
to the begin of the next, while all sequences decode, so there is always work. Two stacks, with and without overlap, run at the
same time and are measured in turn while the other is idle.

5ms, 10ms, 25ms: simulated worker with steps of this length that use no CPU time. tiny: models/tiny. 79M: 79 million random weights.

step: median at the worker. gap: median; share: sum of gaps / sum of steps. Medians over runs, with minimum and maximum.
"""


def main(
    workers: Annotated[str, typer.Option(help=f"Workers, comma-separated: {', '.join(_STEP_S)}.")] = ",".join(_STEP_S),
    pairs: Annotated[int, typer.Option(min=1, help="Runs with and without overlap, in turn.")] = 5,
    seconds: Annotated[float, typer.Option(min=0.1, help="Approximate seconds of a run.")] = 2.0,
    num_seqs: Annotated[int, typer.Option(min=1, max=256, help="Number of decoding sequences.")] = 16,
    save: Annotated[bool, typer.Option("--save", help="Write benchmarks/results/overlap.json.")] = False,
    plot: Annotated[Path | None, typer.Option(help="File of a plot of a few steps of each: PNG, PDF or SVG.")] = None,
) -> None:
    """Measures the gap between steps at the worker with overlap on and off."""
    names = list(dict.fromkeys(workers.split(",")))
    if unknown := [name for name in names if name not in _STEP_S]:
        raise typer.BadParameter(
            f"unknown worker {unknown[0]!r}; workers: {', '.join(_STEP_S)}", param_hint="--workers"
        )
    runs = measure(names, pairs, seconds, num_seqs)
    figures = {name: {lane: summary(of_lane) for lane, of_lane in lanes.items()} for name, lanes in runs.items()}
    if save:
        report.save("overlap", {"benchmark": "overlap", "num_seqs": num_seqs, "pairs": pairs, "workers": figures})
    _show(figures, Console())
    if plot is not None:
        overlap_plot.draw(
            {n: {lane: of_lane[-1] for lane, of_lane in lanes.items()} for n, lanes in runs.items()}, plot
        )


def measure(names: list[str], pairs: int, seconds: float, num_seqs: int) -> Runs:
    """All runs by worker and lane."""
    total = len(names) * pairs * len(LANES)
    with tempfile.TemporaryDirectory() as folder, command_line.progress("overlap", total) as tick:
        return {name: _runs(name, Path(folder), pairs, seconds, num_seqs, tick) for name in names}


def _runs(
    name: str, folder: Path, pairs: int, seconds: float, num_seqs: int, tick: Callable[[], None]
) -> dict[str, list[Run]]:
    """Run with and without overlap in turn, each after a short run that does not count."""
    options = _worker_options(name, folder)
    num_steps = max(_LEAST_STEPS, int(seconds / _STEP_S[name]))
    with ExitStack() as exits:
        stacks = {
            lane: exits.enter_context(TimedStack(options, folder / f"{name}-{overlap}", overlap=overlap))
            for lane, overlap in LANES.items()
        }
        for stack in stacks.values():
            stack.run(num_seqs, _LEAST_STEPS)
        found: dict[str, list[Run]] = {lane: [] for lane in LANES}
        for _ in range(pairs):
            for lane, stack in stacks.items():
                found[lane].append(stack.run(num_seqs, num_steps))
                tick()
    return found


def _worker_options(name: str, folder: Path) -> list[str]:
    if name == "tiny":
        return ["--model", str(TINY)]
    if name != "79M":
        return ["--step-s", str(_STEP_S[name])]
    made = folder / "model"
    command = [sys.executable, "-m", "benchmarks.overlap.model", str(TINY), str(made)]
    subprocess.run(command, check=True, timeout=_MODEL_LIMIT_S, capture_output=True)
    return ["--model", str(made)]


def summary(runs: list[Run]) -> dict[str, Any]:
    """Medians over runs, with minimum and maximum."""
    columns = {
        "step_ms": [run.step_ms for run in runs],
        "gap_us": [run.gap_us for run in runs],
        "share": [run.share for run in runs],
        "steps_per_s": [run.steps_per_s for run in runs],
    }
    return {name: _spread(values) for name, values in columns.items()}


def _spread(values: list[float]) -> dict[str, float]:
    named = {"median": statistics.median(values), "min": min(values), "max": max(values)}
    return {name: round(value, 5) for name, value in named.items()}


def _show(figures: dict[str, dict[str, dict[str, Any]]], console: Console) -> None:
    table = Table("worker", "", "step ms", "gap us", "share of step time", "steps/s")
    for name, lanes in figures.items():
        for lane, f in lanes.items():
            cells = (_cell(f["step_ms"], ",.2f"), _cell(f["gap_us"], ",.0f"), _cell(f["share"], ".1%"))
            table.add_row(name, lane, *cells, _cell(f["steps_per_s"], ",.1f"))
        table.add_section()
    console.print(table)


def _cell(spread: dict[str, float], form: str) -> str:
    return f"{spread['median']:{form}} ({spread['min']:{form}} - {spread['max']:{form}})"


if __name__ == "__main__":
    app = typer.Typer(add_completion=False, rich_markup_mode=None)
    app.command(epilog=_HELP_END)(main)
    app()
