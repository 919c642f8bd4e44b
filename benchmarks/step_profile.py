"""Measures where a step's time goes in the whole stack: parts in the worker, between steps, processor time by process.

    python -m benchmarks.step_profile --save --plot docs/pictures/step-profile.png     # a minute
    python -m benchmarks.step_profile --model bench-15m --requests 8 --output 32       # a short run

This module holds the run through gRPC, figures from the step log and the processes, and the plot.
"""

import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import psutil
import typer
from matplotlib.figure import Figure
from rich.console import Console
from rich.table import Table

from benchmarks import report
from benchmarks.compare import checkpoints, shapes
from benchmarks.compare.wires import GrpcWire
from benchmarks.compare.workloads import Lengths, Workload, drawn, fixed
from quire.local_stack.stack import LocalStack
from quire.operators.admin import AdminClient, step_json
from quire_tools.bench.measure import Record

_PARTS = ("cache", "prepare", "model", "sample")
_BETWEEN, _CLIENT = "between steps", "this client"
_BARS = {"parts_ms": "a step", "cpu_ms_per_step": "CPU time per step"}
_HELP_END = """
All requests arrive at once and are greedy; figures are medians over the steps in which every request gets a token. Parts are the
worker's own times (`quire steps --json`, `times`); between steps: from the end of a step to the begin of the next, at the worker.
CPU time is that of all threads of a process, divided by the number of these steps.
"""


@dataclass(frozen=True, slots=True)
class Course:
    """A run: steps as in `quire steps --json`, processor seconds by process, total seconds."""

    steps: Sequence[Mapping[str, Any]]
    cpu_s: Mapping[str, float]
    seconds: float


def main(
    model: Annotated[
        str, typer.Option(help="bench-135m, bench-15m or a shape (python -m benchmarks.compare).")
    ] = "bench-135m",
    seed: Annotated[int, typer.Option(help="Seed of weights and prompts.")] = 0,
    requests: Annotated[int, typer.Option(min=1, help="At once.")] = 64,
    prompt: Annotated[int, typer.Option(min=1, help="Tokens.")] = 64,
    output: Annotated[int, typer.Option(min=8, help="Tokens.")] = 128,
    worker_args: Annotated[
        list[str] | None, typer.Option("--worker-arg", help="Additional options of `quire serve worker`.")
    ] = None,
    plot: Annotated[Path | None, typer.Option(help="A PNG.")] = None,
    save: Annotated[bool, typer.Option("--save", help="Write benchmarks/results/step-profile.json.")] = False,
) -> None:
    """Measures the parts of a decode step."""
    shape = shapes.parse(model)
    folder = checkpoints.made(model, seed, checkpoints.cache_folder())
    lengths = Lengths(requests, fixed(prompt), fixed(output))
    with LocalStack(model=folder, worker_args=worker_args or ()) as stack:
        rounds = [drawn("W1", lengths, seed=seed, round_=i, vocab_size=shape[1].vocab_size) for i in range(2)]
        courses = [_course(stack, workload) for workload in rounds]  # the first is a warm-up
    found = figures(courses[-1], requests)
    if save:
        report.save("step-profile", {"benchmark": "step_profile", "model": model, "requests": requests, **found})
    _show(found, Console())
    if plot is not None:
        draw(found, f"{model}, {requests} requests decoding", plot)


def _course(stack: LocalStack, workload: Workload) -> Course:
    with AdminClient(stack.admin_address) as admin:
        since = max((step.step for step in admin.steps()), default=0) + 1
        before, began = _cpu_s(stack), time.monotonic()
        asyncio.run(_ask_all(stack.grpc_address, workload))
        seconds, after = time.monotonic() - began, _cpu_s(stack)
        steps = [step_json(step, tables=False) for step in admin.steps(since=since)]
    return Course(steps, {name: after[name] - before[name] for name in after}, seconds)


async def _ask_all(address: str, workload: Workload) -> None:
    wire = GrpcWire(address)
    try:
        calls = [wire.ask(request, Record(request.index, 0.0), time.monotonic) for request in workload.requests]
        await asyncio.gather(*calls)
    finally:
        await wire.close()


def _cpu_s(stack: LocalStack) -> dict[str, float]:
    processes = {name: psutil.Process(pid) for name, pid in stack.pids.items()} | {_CLIENT: psutil.Process()}
    times = {name: process.cpu_times() for name, process in processes.items()}
    return {name: used.user + used.system for name, used in times.items()}


def figures(course: Course, num_requests: int) -> dict[str, Any]:
    """Medians of the full decoding steps, ms, and processor time per step, ms."""
    full = [step for step in course.steps if len(step["sampled"]) == num_requests]
    times = [step["times"] for step in full if not any(group["prefill"] for group in step["scheduled"])]
    if len(times) < 2:
        raise RuntimeError("no two steps in which all requests decode: use more output tokens")
    busy = [sum(one[f"{part}_ns"] for part in _PARTS) for one in times]
    gaps = [
        after["started_ns"] - before["started_ns"] - used
        for (before, after), used in zip(pairwise(times), busy, strict=False)
    ]
    parts = {part: median(one[f"{part}_ns"] for one in times) / 1e6 for part in _PARTS}
    periods = [after["started_ns"] - before["started_ns"] for before, after in pairwise(times)]
    return {
        "num_steps": len(times),
        "step_ms": median(periods) / 1e6,
        "parts_ms": {**parts, _BETWEEN: median(gaps) / 1e6},
        "schedule_ms": median(one["schedule_ns"] for one in times) / 1e6,
        "cpu_ms_per_step": {name: 1e3 * used / len(course.steps) for name, used in course.cpu_s.items()},
        "seconds": course.seconds,
        "output_tokens_per_s": sum(len(ids) for step in course.steps for ids in step["sampled"].values())
        / course.seconds,
    }


def _show(found: Mapping[str, Any], console: Console) -> None:
    table = Table("a step", f"ms of {found['step_ms']:.2f}", title=f"{found['output_tokens_per_s']:.0f} tokens/s")
    for name, value in found["parts_ms"].items():
        table.add_row(name, f"{value:.3f}")
    console.print(table)
    costs = Table("process", "CPU ms per step")
    for name, value in found["cpu_ms_per_step"].items():
        costs.add_row(name, f"{value:.2f}")
    costs.add_row("of which schedule()", f"{found['schedule_ms']:.3f}")
    console.print(costs)


def draw(found: Mapping[str, Any], title: str, path: Path) -> None:
    """Draw two stacked bars with legends: a step's wall time by part, and processor time per step by process."""
    figure = Figure(figsize=(9.5, 3.6), layout="constrained")
    for axes, (name, what) in zip(figure.subplots(2, 1), _BARS.items(), strict=True):
        left = 0.0
        for part, value in found[name].items():
            axes.barh(0, value, left=left, edgecolor="white", label=f"{part} {value:.2f}")
            left += value
        axes.set_yticks([])
        axes.set_xlabel("ms")
        axes.set_title(f"{what}: {left:.1f} ms", loc="left", fontsize=10)
        axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), fontsize=8, frameon=False)
    figure.suptitle(title, fontsize=11)
    figure.savefig(path, dpi=110)


if __name__ == "__main__":
    app = typer.Typer(add_completion=False, rich_markup_mode=None)
    app.command(epilog=_HELP_END)(main)
    app()
