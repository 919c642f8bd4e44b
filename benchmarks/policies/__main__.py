"""Compares scheduling policies in modelled time on four workloads: latencies, lost work, throughput.

    python -m benchmarks.policies                                  # all four workloads, a table each
    python -m benchmarks.policies --json --workload chat --policies vllm-v1,quire
    python -m benchmarks.policies --record recorded                # the workloads under vllm-v1, as recordings
    python -m benchmarks.policies --from recorded --check          # the tables from them; status 1 if quire breaks a promise

Real core and ledger, modelled worker and clock (`quire_tools.simulation`): the same seed gives the same
figures on any machine. This module holds the command line. Runs: benchmarks.policies.runs. Recordings:
benchmarks.policies.recordings. Tables: benchmarks.policies.tables. What must hold: benchmarks.policies.bars.
The plot: benchmarks.policies.plot. Workloads: quire_tools.simulation.workloads.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from benchmarks import command_line, report
from benchmarks.policies import bars as policies_bars
from benchmarks.policies import plot as policies_plot
from benchmarks.policies import recordings as policies_recordings
from benchmarks.policies import runs as policies_runs
from benchmarks.policies import tables as policies_tables
from benchmarks.policies.runs import Comparison
from quire_tools.simulation.workloads import WORKLOADS
from scheduler_svc.core.composition import presets
from svc_common.errors import QuireError

DEFAULT_POLICIES = ("vllm-v0", "vllm-v1", "vllm-v1-async", "chitu", "quire")
RECORDED_POLICY = "vllm-v1"

_HELP_END = """
Times are those of a cost model of a GPU with a model of 8 billion parameters (quire_tools/simulation/cost_model.py), with at most
64 concurrent sequences and 2,048 tokens per step (8,192 for policies that compute whole prompts); with --from, those of a cost
model fitted to each recording, under its limits. The scheduler does not know output lengths. Lost tokens are tokens that had to be
computed again.
"""


def main(
    policies: Annotated[str, typer.Option(help="Presets, P,P,...")] = "",
    workload: Annotated[str, typer.Option(help=f"Workloads W,W,...: {', '.join(WORKLOADS)}, or those in --from.")] = "",
    requests: Annotated[int, typer.Option(min=0, help="Requests per workload; 0: as many as its figures need.")] = 0,
    seed: Annotated[int | None, typer.Option(help="Seed of arrivals, lengths and tokens; default 1.")] = None,
    record: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Write only DIR/WORKLOAD.rec for each workload.")
    ] = None,
    under: Annotated[str, typer.Option(metavar="P", help="The policy that --record records.")] = RECORDED_POLICY,
    source: Annotated[Path | None, typer.Option("--from", metavar="DIR", help="Predict from DIR/*.rec.")] = None,
    check: Annotated[
        bool, typer.Option("--check", help="Exit status 1 if quire breaks a promise; prints which.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object on standard output, nothing else.")] = False,
    save: Annotated[bool, typer.Option("--save", help="Write benchmarks/results/policies.json.")] = False,
    plot: Annotated[Path | None, typer.Option(help="File of a plot of the latencies: PNG, PDF or SVG.")] = None,
) -> None:
    """Compares scheduling policies on chat, long prompts, bursts and agents in modelled time."""
    names = _chosen(policies, presets.policy_names(), list(DEFAULT_POLICIES))
    if check:
        _check_names(names)
    if source is not None and (requests or seed is not None):
        raise typer.BadParameter("--requests and --seed are fixed in the recordings of --from; omit them")
    if record is not None and (source is not None or check or as_json or save or plot is not None):
        raise typer.BadParameter("--record only writes recordings; compare them with --from afterwards")
    size = _Size(1 if seed is None else seed, requests)
    try:
        if record is not None:
            _record(record, under, _chosen(workload, list(WORKLOADS), list(WORKLOADS)), size)
            return
        compared = _simulated(names, workload, size) if source is None else _predicted(source, names, workload)
    except (QuireError, OSError) as error:
        raise typer.BadParameter(str(error)) from None
    failures = _failures(compared) if check else None
    _tell(compared, None if source is not None else size.seed, failures, as_json=as_json, save=save, plot=plot)
    if failures:
        raise typer.Exit(1)


def _check_names(names: list[str]) -> None:
    if not (policies_bars.OURS in names and policies_bars.teachers_of(names)):
        teachers = ", ".join(policies_bars.TEACHERS)
        held = f"--check compares {policies_bars.OURS} with {teachers}"
        raise typer.BadParameter(f"{held}: --policies must name it and one of them")


def _tell(
    compared: dict[str, Comparison],
    seed: int | None,
    failures: list[str] | None,
    *,
    as_json: bool,
    save: bool,
    plot: Path | None,
) -> None:
    """Write all outputs."""
    result = policies_tables.content(compared, seed, failures)
    if save:
        report.save("policies", {"benchmark": "policies", **result})
    if plot is not None:
        policies_plot.draw({kind: of_kind.runs for kind, of_kind in compared.items()}, plot)
    if as_json:
        print(json.dumps({**report.provenance(), **result}, indent=2))
    else:
        policies_tables.show(compared, failures, Console())


@dataclass(frozen=True, slots=True)
class _Size:
    """Size of generated workloads; `num_requests` 0: as many as the figures need."""

    seed: int
    num_requests: int


def _record(folder: Path, policy: str, kinds: list[str], size: _Size) -> None:
    """Write one recording per workload, with a line on standard output for each."""
    _chosen(policy, presets.policy_names(), [])
    with command_line.progress("recording", len(kinds)) as tick:
        for kind in kinds:
            work, load = policies_runs.make(kind, size.seed, size.num_requests)
            path = folder / f"{kind}{policies_recordings.SUFFIX}"
            history = policies_recordings.write(path, policy, work, load)
            print(f"{path}: {len(history.requests):,} requests, {len(history.steps):,} steps under {policy}")
            tick()


def _simulated(names: list[str], workload: str, size: _Size) -> dict[str, Comparison]:
    """Run each workload under each policy, with the cost model of the GPU."""
    kinds = _chosen(workload, list(WORKLOADS), list(WORKLOADS))
    found: dict[str, Comparison] = {}
    with command_line.progress("policies", len(names) * len(kinds)) as tick:
        for kind in kinds:
            work, load = policies_runs.make(kind, size.seed, size.num_requests)
            found[kind] = Comparison(load, {})
            for name in names:
                found[kind].runs[name] = policies_runs.serve(name, work, load)
                tick()
    return found


def _predicted(folder: Path, names: list[str], workload: str) -> dict[str, Comparison]:
    """Predict each policy's run of each recording, with the cost model fitted to it."""
    paths = policies_recordings.found(folder)
    kinds = _chosen(workload, list(paths), list(paths))
    with command_line.progress("policies", len(names) * len(kinds)) as tick:
        return {kind: policies_recordings.predict(paths[kind], names, tick) for kind in kinds}


def _failures(compared: dict[str, Comparison]) -> list[str]:
    return [f"{kind}: {what}" for kind, one in compared.items() for what in policies_bars.broken(one.figures())]


def _chosen(text: str, known: list[str], default: list[str]) -> list[str]:
    names = [name for name in text.split(",") if name] or default
    for name in names:
        if name not in known:
            raise typer.BadParameter(f"unknown: {name!r}; known: {', '.join(known)}")
    return names


if __name__ == "__main__":
    app = typer.Typer(add_completion=False, rich_markup_mode=None)
    app.command(epilog=_HELP_END)(main)
    app()
