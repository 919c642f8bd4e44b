"""Measures KV-cache memory use: what sharing saves, what last blocks waste, and memory without paging.

    python -m benchmarks.memory                       # a table
    python -m benchmarks.memory --json                # one JSON object, nothing else
    python -m benchmarks.memory --prompt 161 --outputs 338 --block-size 16 --n 2,4,6
    python -m benchmarks.memory --plot memory.png --save
    python -m benchmarks.memory --recording FILE      # a recorded scenario

This module holds the command line and its tables. Figures: benchmarks.memory.workloads. Serving:
benchmarks.memory.runs.
"""

import json
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from benchmarks import command_line, report
from benchmarks.memory import plot as memory_plot
from benchmarks.memory import recording as memory_recording
from benchmarks.memory import workloads as memory_workloads
from benchmarks.memory.runs import MAX_N

_HELP_END = """
Examples: python -m benchmarks.memory --json --prompt 161 --outputs 338 --block-size 16 --n 2,4,6;
python -m benchmarks.memory --plot memory.png; python -m benchmarks.memory --recording scenario.json

Constant lengths: one request is served by the real scheduler core (preset vllm-v0) and its block tables are read right after
schedule() at each decode step; "closed form" is computed from the lengths alone and must be the same.

Workloads, only for n > 1: lengths like the paper's; "paper" is the range that it reports. Beams are made from random logprobs: at
8 % of the positions of a text many words are possible, elsewhere one. Without paging: the same requests with one region of 2,048
slots per sample.

used: slots that hold a token. reserved: slots that will hold one. internal: slots of a region that are never used. external: slots
outside all regions, in holes too small for the waiting requests. The four add up to 1.
"""


def main(
    prompt: Annotated[int, typer.Option(min=1, help="Prompt tokens of the constant request.")] = 161,
    outputs: Annotated[int, typer.Option(min=1, help="Decode steps of the constant request (max_tokens - 1).")] = 338,
    block_size: Annotated[int, typer.Option(min=1, help="Tokens per block.")] = 16,
    n: Annotated[
        str, typer.Option("--n", help="Samples or beams per request: N or N,N,... Workloads need n > 1.")
    ] = "2,4,6",
    requests: Annotated[int, typer.Option(min=1, help="Requests of each workload.")] = 40,
    seed: Annotated[int, typer.Option(help="Seed of lengths, arrivals and logprobs.")] = 1,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object on standard output, nothing else.")] = False,
    save: Annotated[bool, typer.Option("--save", help="Write benchmarks/results/memory.json.")] = False,
    plot: Annotated[
        Path | None, typer.Option(help="File of a plot of memory over time with the largest n: PNG, PDF or SVG.")
    ] = None,
    recording: Annotated[
        Path | None, typer.Option(help="Report a recorded scenario of family v0 instead.", exists=True, dir_okay=False)
    ] = None,
) -> None:
    """Measures shared and wasted KV-cache memory, and the memory needed without paging."""
    counts = command_line.numbers(n, 1, MAX_N, "2,4,6")
    if recording is not None:
        _show_recording(memory_recording.report(recording), as_json=as_json)
        return
    result = _measure(prompt, outputs, block_size, counts, requests, seed)
    if save:
        report.save("memory", {"benchmark": "memory", **result})
    if as_json:
        print(json.dumps({**report.provenance(), **result}, indent=2))
    else:
        _show(result, Console())
    if plot is not None:
        workloads = list(memory_workloads.WORKLOADS)
        with command_line.progress("plot", len(workloads)) as tick:
            memory_plot.draw(workloads, max(2, *counts), requests, seed, plot, tick=tick)


def _measure(prompt: int, outputs: int, block_size: int, counts: list[int], requests: int, seed: int) -> dict[str, Any]:
    shared = [n for n in counts if n > 1]
    result: dict[str, Any] = {"constant": [], "workloads": []}
    with command_line.progress("memory", len(counts) + len(memory_workloads.WORKLOADS) * len(shared)) as tick:
        for n in counts:
            result["constant"].append(memory_workloads.constant(prompt, outputs, block_size, n))
            tick()
        for row in memory_workloads.all_figures(shared, requests, seed):
            result["workloads"].append(row)
            tick()
    return result


def _show(result: dict[str, Any], console: Console) -> None:
    table = Table(
        "n", "saved", "closed form", "most waste of a sequence", title="constant lengths", title_justify="left"
    )
    for row in result["constant"]:
        waste = f"{row['max_waste_tokens']} of {row['block_size']} slots"
        table.add_row(str(row["n"]), f"{row['saved']:.1%}", f"{row['closed_form']:.1%}", waste)
    console.print(table)
    if result["workloads"]:
        _show_workloads(result["workloads"], console)


def _show_workloads(rows: list[dict[str, Any]], console: Console) -> None:
    paged = Table("workload", "n", "saved", "paper", "waste", title="workloads, paged memory", title_justify="left")
    parts = ("used", "reserved", "internal", "external")
    contiguous = Table("workload", "n", *parts, title="the same without paging", title_justify="left")
    for row in rows:
        name, (low, high) = (f"{row['name']} {row['kind']}", str(row["n"])), row["paper"]
        paged.add_row(*name, f"{row['saved']:.1%}", f"{low:.0%}-{high:.0%}", f"{row['waste']:.1%}")
        contiguous.add_row(*name, *(f"{row['contiguous'][part]:.1%}" for part in parts))
    console.print(paged)
    console.print(contiguous)


def _show_recording(result: dict[str, Any], *, as_json: bool) -> None:
    if as_json:
        print(json.dumps(result, indent=2))
        return
    table = Table("step", "logical", "physical", "saved", "waste tokens", "worst", title=result["name"])
    for row in result["steps"]:
        table.add_row(*(f"{value:.1%}" if key == "saved" else str(value) for key, value in row.items()))
    Console().print(table)


if __name__ == "__main__":
    app = typer.Typer(add_completion=False, rich_markup_mode=None)
    app.command(epilog=_HELP_END)(main)
    app()
