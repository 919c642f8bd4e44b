"""Policies compared in modelled time on four workloads: latencies, lost work, throughput (issue 4; `scheduler_svc.simulation`).

    python -m benchmarks.policies                                  # all four workloads, a table each
    python -m benchmarks.policies --json --workload chat --policies vllm-v1,quire
    python -m benchmarks.policies --plot policies.png --save

Real core and ledger, modelled worker and clock: the same seed gives the same figures on any machine. Lives here: the command line
and its tables. Workloads: scheduler_svc.simulation.workloads. The plot: benchmarks.policies_plot.
"""

import json
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from benchmarks import command_line, policies_plot, report
from scheduler_svc.core import presets
from scheduler_svc.core.limits import CoreLimits
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.simulation.cost_model import GPU
from scheduler_svc.simulation.history import Figures, History
from scheduler_svc.simulation.simulation import Simulation
from scheduler_svc.simulation.workloads import WORKLOADS, Workload
from svc_common.errors import ConfigError

DEFAULT_POLICIES = ("vllm-v0", "vllm-v1", "vllm-v1-async", "chitu", "quire")
MAX_MODEL_LEN = 8_192
BUDGET = 2_048


@dataclass(frozen=True, slots=True)
class Load:
    """How hard a workload drives the machine: close to all it can do, with too few blocks for all. `rate`: requests/s."""

    rate: float
    num_gpu_blocks: int
    num_requests: int


LOADS = {
    "chat": Load(rate=12.0, num_gpu_blocks=1_600, num_requests=1_200),
    "long-prompts": Load(rate=9.5, num_gpu_blocks=2_000, num_requests=800),
    "bursts": Load(rate=12.0, num_gpu_blocks=1_200, num_requests=1_000),
    "agents": Load(rate=13.0, num_gpu_blocks=1_500, num_requests=1_000),
}

_HELP_END = """
Times are of a model of a GPU that serves 8 billion parameters (scheduler_svc/simulation/cost_model.py), with at most 64 sequences
at a time and 2,048 tokens a step (8,192 where a policy computes whole prompts). Output lengths are not known to the scheduler.
Lost tokens were computed before and had to be computed again.
"""


def main(
    policies: Annotated[str, typer.Option(help="Presets, P,P,...")] = "",
    workload: Annotated[str, typer.Option(help=f"W,W,... of {', '.join(WORKLOADS)}.")] = "",
    requests: Annotated[int, typer.Option(min=0, help="Of each workload; 0: as many as its figures need.")] = 0,
    seed: Annotated[int, typer.Option(help="Of arrivals, lengths and tokens.")] = 1,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object on standard output, nothing else.")] = False,
    save: Annotated[bool, typer.Option("--save", help="Write benchmarks/results/policies.json.")] = False,
    plot: Annotated[Path | None, typer.Option(help="Draw the latencies: PNG, PDF or SVG.")] = None,
) -> None:
    """Compares scheduling policies on chat, long prompts, bursts and agents in modelled time."""
    names = _chosen(policies, presets.policy_names(), [p for p in DEFAULT_POLICIES if p in presets.policy_names()])
    kinds = _chosen(workload, list(WORKLOADS), list(WORKLOADS))
    runs: dict[str, dict[str, History]] = {}
    with command_line.progress("policies", len(names) * len(kinds)) as tick:
        for kind in kinds:
            load = LOADS[kind]
            jobs = WORKLOADS[kind](seed, requests or load.num_requests, load.rate)
            runs[kind] = {}
            for name in names:
                runs[kind][name] = serve(name, jobs, load)
                tick()
    result = {"seed": seed, "workloads": {kind: _content(kind, of_kind) for kind, of_kind in runs.items()}}
    if save:
        report.save("policies", {"benchmark": "policies", **result})
    if as_json:
        print(json.dumps({**report.provenance(), **result}, indent=2))
    else:
        _show(runs, Console())
    if plot is not None:
        policies_plot.draw(runs, plot)


def serve(policy: str, workload: Workload, load: Load) -> History:
    """One policy serves one workload."""
    core = build(policy, load)
    core.observe_costs(GPU.costs)
    return Simulation(core, workload.arrivals(), workload.tokens(), GPU, seed=workload.seed).run()


def build(policy: str, load: Load) -> Scheduler:
    """The preset with the same limits as all others; a budget of whole prompts where it needs that."""
    limits = CoreLimits(
        block_size=16,
        num_gpu_blocks=load.num_gpu_blocks,
        num_cpu_blocks=load.num_gpu_blocks // 2,
        max_model_len=MAX_MODEL_LEN,
        max_num_seqs=64,
        max_num_batched_tokens=BUDGET,
    )
    try:
        return presets.build(policy, limits)
    except ConfigError:
        return presets.build(policy, replace(limits, max_num_batched_tokens=MAX_MODEL_LEN))


def _chosen(text: str, known: list[str], default: list[str]) -> list[str]:
    names = [name for name in text.split(",") if name] or default
    for name in names:
        if name not in known:
            raise typer.BadParameter(f"there is no {name!r}; there are: {', '.join(known)}")
    return names


def _content(kind: str, runs: dict[str, History]) -> dict[str, Any]:
    return {"load": asdict(LOADS[kind]), "policies": {name: asdict(run.figures()) for name, run in runs.items()}}


def _show(runs: dict[str, dict[str, History]], console: Console) -> None:
    for kind, of_kind in runs.items():
        load = LOADS[kind]
        title = f"{kind}: {load.rate:g} requests/s, {load.num_gpu_blocks} blocks (times: p50 / p99)"
        columns = ("TTFT, s", "TPOT, ms", "tokens/s", "preempted", "lost tokens", "computed", "fairness", "done")
        table = Table("policy", *columns, title=title, title_justify="left")
        for name, history in of_kind.items():
            table.add_row(name, *_cells(history.figures()))
        console.print(table)


def _cells(f: Figures) -> list[str]:
    lost = f.num_lost_tokens / f.num_computed_tokens if f.num_computed_tokens else 0.0
    return [
        f"{f.ttft_p50_s:.3f} / {f.ttft_p99_s:.3f}",
        f"{f.tpot_p50_s * 1e3:.1f} / {f.tpot_p99_s * 1e3:.1f}",
        f"{f.throughput:,.0f}",
        str(f.num_preemptions),
        f"{f.num_lost_tokens:,} ({lost:.2%})",
        f"{f.num_computed_tokens:,}",
        f"{f.fairness:.2f}",
        f"{f.num_done} of {f.num_requests}",
    ]


if __name__ == "__main__":
    app = typer.Typer(add_completion=False, rich_markup_mode=None)
    app.command(epilog=_HELP_END)(main)
    app()
