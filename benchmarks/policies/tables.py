"""The policy comparison as tables and as JSON."""

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.policies import bars
from benchmarks.policies.runs import Comparison, Source
from quire_tools.simulation.history import Figures

_COLUMNS = ("TTFT, s", "TPOT, ms", "tokens/s", "preempted", "lost tokens", "computed", "fairness", "done")


def content(compared: Mapping[str, Comparison], seed: int | None, failures: list[str] | None) -> dict[str, Any]:
    """The comparison as JSON values. `seed`: None if read from recordings; `failures`: None if nothing was checked."""
    workloads = {kind: _content(comparison) for kind, comparison in compared.items()}
    checked = {} if failures is None else {"failures": failures}
    return {**({} if seed is None else {"seed": seed}), "workloads": workloads, **checked}


def _content(comparison: Comparison) -> dict[str, Any]:
    source = {} if comparison.source is None else {"recorded": asdict(comparison.source)}
    policies = {name: asdict(figures) for name, figures in comparison.figures().items()}
    return {"load": asdict(comparison.load), **source, "policies": policies}


def show(compared: Mapping[str, Comparison], failures: list[str] | None, console: Console) -> None:
    """Print a table per workload, the basis of its times, and the checks."""
    for kind, comparison in compared.items():
        load = comparison.load
        title = f"{kind}: {load.rate:.3g} requests/s, {load.num_gpu_blocks} blocks (times: p50 / p99)"
        table = Table("policy", *_COLUMNS, title=title, title_justify="left")
        if comparison.source is not None:
            table.add_row(
                f"recorded ({comparison.source.policy})", *_cells(comparison.source.figures), end_section=True
            )
        for name, figures in comparison.figures().items():
            table.add_row(name, *_cells(figures))
        console.print(table)
        if comparison.source is not None:
            console.print(_basis(comparison.source), markup=False, soft_wrap=True)
    if failures is not None:
        _show_checked(compared, failures, console)


def _basis(source: Source) -> str:
    return (
        f"predicted from {source.file}: step times of a model fitted to its {source.fit.num_steps:,} steps, "
        f"median error {source.fit.error:.1%}"
    )


def _show_checked(compared: Mapping[str, Comparison], failures: list[str], console: Console) -> None:
    """Print broken promises, or that all hold, and where `quire` or another policy is better in everything."""
    for failure in failures:
        console.print(f"FAILED {failure}", markup=False, soft_wrap=True)
    if not failures:
        console.print(f"ok: all promises of {bars.OURS} hold on {', '.join(compared)}", markup=False)
    of_all = [(kind, comparison.figures()) for kind, comparison in compared.items()]
    for name in [name for name in of_all[0][1] if name != bars.OURS]:
        better = [kind for kind, of in of_all if bars.is_better(of[bars.OURS], of[name])]
        worse = [kind for kind, of in of_all if bars.is_better(of[name], of[bars.OURS])]
        text = f"TTFT p99, TPOT p99 and tokens/s all better than {name}'s on: {', '.join(better) or 'none'}"
        console.print(f"{text}{'; all worse on: ' * bool(worse)}{', '.join(worse)}", markup=False, soft_wrap=True)


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
