"""Measures the scheduler core: CPU time per step and admission, message bytes, encoding and decoding.

    python -m benchmarks.scheduler_core                              # a table, all sizes
    python -m benchmarks.scheduler_core --json                       # one JSON object, nothing else
    python -m benchmarks.scheduler_core --running 32,1024 --verify   # some sizes, checked against a brute-force model

This module holds the command line, the goals and tables. Runs: benchmarks.scheduler_core.runs; the model:
benchmarks.scheduler_core.model.
"""

import json
import sys
from collections.abc import Callable
from dataclasses import asdict
from itertools import product
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from benchmarks import command_line, report
from benchmarks.scheduler_core import runs as scheduler_runs
from benchmarks.scheduler_core import wire as scheduler_wire
from benchmarks.scheduler_core.runs import CHURN, Case
from benchmarks.scheduler_core.workers import many_workers

_SIZES = "32,256,1024,4096,16384"
_MOST_RUNNING = 1_000_000
_PROMPT_TOKENS = 1024
_ADMISSIONS = 128
_WIRE_ROWS = 256
_MOST_WORKERS, _WORKER_ROWS = 1_024, 256
_MOST_GROUPS, _GROUP_ROWS = 64, 256
Rows = list[dict[str, Any]]

_EXAMPLES = """
steady: `step_us` = CPU time of schedule() + update() of all timed steps / number of steps, with the garbage collector on. Lengths
are spread so that in each step 1/16 of the sequences need a block; the number of timed steps is a multiple of 16, so work done once
per block counts in full. With caching each full block is hashed and can be hit. async: a plan is made while another is in flight.

churn 0.01: in each step 1 % of the requests end (at least one) and as many arrive, with prompts of 32 to 47 tokens. Their add() is
not in `step_us`; see admission. Each case runs in turns with the one without churn, 16 steps each; ratio: its time / the other's
in each pair of turns, median (least-greatest). n = 2: two samples per request; `running` counts sequences.

message bytes: a separate run, in which all sequences fill their blocks in the same step. `message_bytes` is the median of 16 steps,
that is, of a step without new blocks; `block_bytes` is the mean, which includes the cost of new blocks.

admission: add() and the schedule() that admits a 1,024-token prompt with no other request; miss: hashed and new; hit: cached.
hash: the hashes of its blocks alone.

wire: a step in which all 256 rows change, from columns to bytes and from bytes to checked arrays.

workers: with --workers, one scheduler plans for so many worker groups with 256 running sequences each, under `quire` with caching:
CPU time of one worker group's schedule() + update(), median over rounds (least-greatest).

groups: with --groups, 256 running sequences of models with so many cache groups, of which all but the first have a window of 64
tokens, without and with states; with caching, without churn, in turns. ratio: to the first of them.

--verify models each run with one plain object per sequence and compares counters, tables, reference counts, prefixes and outputs
outside the timing. Differences are printed on standard error; the exit status is then 1.
"""


def pairs(sizes: list[int]) -> list[list[Case]]:
    """All combinations, in the order of the table: without churn and with it."""
    axes = product(sizes, (False, True), (False, True), (1, 2))
    return [[Case(size, caching, late, churn, n) for churn in (0.0, CHURN)] for size, caching, late, n in axes]


def of_groups(counts: list[int]) -> Rows:
    """Figures of models with so many cache groups, without states and with them, in turns."""
    axes = product((False, True), counts)
    cases = [
        Case(_GROUP_ROWS, caching=True, asynchronous=False, churn=0.0, n=1, num_groups=count, has_states=states)
        for states, count in axes
    ]
    figures = map(asdict, scheduler_runs.side_by_side(cases, verify=False))
    return [{**asdict(case), **row} for case, row in zip(cases, figures, strict=True)]


def measure(sizes: list[int], *, verify: bool, tick: Callable[[], None]) -> tuple[dict[str, Any], list[str]]:
    """All figures, and the differences found by --verify. `tick` is called after each pair and once more."""
    steady: Rows = []
    differences: list[str] = []
    for pair in pairs(sizes):
        for case, measured in zip(pair, scheduler_runs.side_by_side(pair, verify=verify), strict=True):
            figures = asdict(measured)
            differences += [f"{_name(case)}: {text}" for text in figures.pop("differences")]
            steady.append({**asdict(case), **figures})
        tick()
    admission: Rows = []
    for hit, admitted in scheduler_runs.admission(_PROMPT_TOKENS, _ADMISSIONS, verify=verify).items():
        figures = asdict(admitted)
        differences += [f"admission, {'hit' if hit else 'miss'}: {text}" for text in figures.pop("differences")]
        admission.append({"hit": hit, "prompt_tokens": _PROMPT_TOKENS, **figures})
    wire = asdict(scheduler_wire.wire(_WIRE_ROWS))
    wrong = wire.pop("differences")
    differences += wrong if verify else []
    tick()
    figures = {"steady": steady, "admission": admission, "wire": wire}
    return {"benchmark": "scheduler-core", **figures, "goals": _goals(steady, admission, wire)}, differences


def _name(case: Case) -> str:
    words = ("caching" if case.caching else "no caching", "async" if case.asynchronous else "sync")
    return f"{case.running} running, {', '.join(words)}, churn {case.churn:g}, n = {case.n}"


# --- goals ------------------------------------------------------------------------------------------------------------


def _goals(steady: Rows, admission: Rows, wire: dict[str, Any]) -> Rows:
    """Goals B1 to B5 of docs/performance.md, and B6: the worst figure of each; None if not measured."""

    def worst(running: int, *, caching: tuple[bool, ...]) -> float | None:
        decode = [row for row in steady if row["running"] == running and not row["churn"]]
        return max((row["step_us"] for row in decode if row["caching"] in caching), default=None)

    sizes = {row["running"] for row in steady}
    lengths = {row["message_bytes"] for row in steady if not row["churn"]}
    growth = max(lengths) - min(lengths) if len(sizes) > 1 else None
    churned = [row["ratio"][0] for row in steady if row["running"] == 1024 and row["churn"]]
    [miss] = [row["request_us"] for row in admission if not row["hit"]]
    return [
        _goal("B1", "us per step, 1,024 running", worst(1024, caching=(False, True)), 150),
        _goal("B2", "us per step, 16,384, no caching", worst(16_384, caching=(False,)), 1500),
        _goal("B2", "us per step, 16,384, caching", worst(16_384, caching=(True,)), 3000),
        _goal("B3", "us to admit 1,024 tokens, hashed", miss, 60),
        _goal("B4", "bytes more in larger batches", growth, 0),
        _goal("B5", "us, 256 changes there and back", round(wire["encode_us"] + wire["decode_us"], 2), 25),
        _goal("B6", "times a steady step, 1 % churn, 1,024", max(churned, default=None), 3),
    ]


def _goal(name: str, what: str, measured: float | None, limit: float) -> dict[str, Any]:
    met = None if measured is None else measured <= limit
    return {"id": name, "what": what, "measured": measured, "at_most": limit, "met": met}


# --- the command -------------------------------------------------------------------------------------------------------


def main(
    running: Annotated[str, typer.Option(help="Number of running sequences: N or N,N,...")] = _SIZES,
    verify: Annotated[
        bool, typer.Option("--verify", help="Check against a brute-force model; status 1 if it differs.")
    ] = False,
    workers: Annotated[str, typer.Option(help="Numbers of worker groups N,N,... to plan for as well.")] = "",
    groups: Annotated[str, typer.Option(help="Numbers of cache groups N,N,... to plan for as well.")] = "",
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object on standard output, nothing else.")] = False,
    out: Annotated[Path | None, typer.Option(help="Write the result to this file too.")] = None,
) -> None:
    """Measures the scheduler core alone: no services, no model, one process."""
    sizes = command_line.numbers(running, 2, _MOST_RUNNING, "32,1024")
    with command_line.progress("scheduler core", len(pairs(sizes)) + 1) as tick:
        result, differences = measure(sizes, verify=verify, tick=tick)
    if workers:
        counts = command_line.numbers(workers, 1, _MOST_WORKERS, "1,64")
        result["workers"] = [asdict(row) for churn in (0.0, CHURN) for row in many_workers(counts, _WORKER_ROWS, churn)]
    if groups:
        result["groups"] = of_groups(command_line.numbers(groups, 1, _MOST_GROUPS, "1,6"))
    if verify:
        result["verified"] = not differences
    if out is not None:
        report.save("scheduler-core", result, out)
    if as_json:
        print(json.dumps({**report.provenance(), **result}, indent=2))
    else:
        _show(result, Console())
    for text in differences:
        print(f"differs: {text}", file=sys.stderr)
    if differences:
        raise typer.Exit(1)


def _show(result: dict[str, Any], console: Console) -> None:
    title = "steady: CPU us per step; bytes of its message, then with new blocks (mean)"
    headers = ("running", "caching", "async", "churn", "n", "step us", "ratio", "bytes", "mean")
    table = Table(*headers, title=title, title_justify="left")
    for row in result["steady"]:
        flags = ["yes" if row[name] else "" for name in ("caching", "asynchronous")]
        numbers = [f"{row[name]:,.0f}" for name in ("message_bytes", "block_bytes")]
        churn = f"{row['churn']:.0%}" if row["churn"] else ""
        ratio = "{:.1f} ({:.1f}-{:.1f})".format(*row["ratio"]) if row["churn"] else ""
        table.add_row(f"{row['running']:,}", *flags, churn, str(row["n"]), f"{row['step_us']:,.0f}", ratio, *numbers)
    console.print(table)
    table = Table(
        "1,024-token prompt",
        "us",
        "add",
        "schedule",
        "hash",
        title="admission: CPU us per request",
        title_justify="left",
    )
    for row in result["admission"]:
        times = [f"{row[name]:,.1f}" for name in ("request_us", "add_us", "schedule_us", "hash_us")]
        table.add_row("hit" if row["hit"] else "miss", *times)
    console.print(table)
    if "workers" in result:
        table = Table("workers", "churn", "us", "least-greatest", title="many workers: CPU us per step of one of them")
        for row in result["workers"]:
            times = f"{row['step_us']:,.0f}", f"{row['least_us']:,.0f}-{row['most_us']:,.0f}"
            table.add_row(str(row["workers"]), f"{row['churn']:.0%}" if row["churn"] else "", *times)
        console.print(table)
    if "groups" in result:
        table = Table("cache groups", "states", "us", "ratio", "bytes", title="cache groups: CPU us per step")
        for row in result["groups"]:
            ratio = "{:.1f} ({:.1f}-{:.1f})".format(*row["ratio"])
            states = "yes" if row["has_states"] else ""
            table.add_row(str(row["num_groups"]), states, f"{row['step_us']:,.0f}", ratio, str(row["message_bytes"]))
        console.print(table)
    table = Table("goal", "", "measured", "at most", "", title="goals: the worst figure of each", title_justify="left")
    for goal in result["goals"]:
        measured = (
            "-"
            if goal["measured"] is None
            else f"{goal['measured']:,.3g}"
            if goal["measured"] < 10
            else f"{goal['measured']:,.0f}"
        )
        verdict = {None: "", True: "met", False: "missed"}[goal["met"]]
        table.add_row(goal["id"], goal["what"], measured, f"{goal['at_most']:,}", verdict)
    console.print(table)


if __name__ == "__main__":
    app = typer.Typer(add_completion=False, rich_markup_mode=None)
    app.command(epilog=_EXAMPLES)(main)
    app()
