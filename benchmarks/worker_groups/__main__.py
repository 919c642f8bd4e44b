"""Several worker groups under one scheduler in modelled time: latencies beside separate schedulers, and cache hits beside routers.

    python -m benchmarks.worker_groups                          # both tables
    python -m benchmarks.worker_groups --json --requests 300    # smaller, as JSON
    python -m benchmarks.worker_groups --save                   # benchmarks/results/worker_groups.json and its plot

Real core and block tables, modelled workers and clock (`quire_tools.simulation`): the same seed gives the same figures on any
machine. Runs: benchmarks.worker_groups.runs. The peers' way: benchmarks.worker_groups.router.
"""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from benchmarks import report
from benchmarks.worker_groups import plot as figures_plot
from benchmarks.worker_groups import runs
from benchmarks.worker_groups.runs import Placed

POLICIES = ("quire", "vllm-v1", "vllm-v0")
NUM_WORKERS = (2, 4, 8)
LATENCIES = ("ttft_p50_s", "ttft_p99_s", "tpot_p50_s", "tpot_p99_s")
PLACEMENTS = ("prefix_affinity", "least_work", "round_robin")
OF_HITS = 4
"""Workers of the table of cache hits."""


def main(
    requests: Annotated[int, typer.Option(min=20, help="Requests of each crowd; there is one for each worker.")] = 600,
    seed: Annotated[int, typer.Option(help="Seed of arrivals, lengths and tokens.")] = 1,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object on standard output, nothing else.")] = False,
    save: Annotated[bool, typer.Option("--save", help="Write benchmarks/results/worker_groups.json and .png.")] = False,
    plot: Annotated[Path | None, typer.Option(help="File of a plot: PNG, PDF or SVG.")] = None,
) -> None:
    """Measures one scheduler with N workers in virtual time: latencies at N times the load, and cache hits by placement."""
    console = Console(stderr=True)
    with console.status("simulating"):
        found = {"latencies": latencies(requests, seed), "hits": hits(requests, seed)}
    if as_json:
        typer.echo(json.dumps(found))
    else:
        for table in (latency_table(found["latencies"]), hit_table(found["hits"])):
            Console().print(table)
    if save:
        report.save("worker_groups", {"benchmark": "worker_groups", "requests": requests, "seed": seed, **found})
    picture = plot or (report.RESULTS / "worker_groups.png" if save else None)
    if picture is not None:
        figures_plot.draw(found, picture)


def latencies(num_requests: int, seed: int, policies: tuple[str, ...] = POLICIES) -> list[dict[str, Any]]:
    """Latencies of one scheduler with N workers, beside N schedulers with one each, for chats."""
    rows = []
    for policy in policies:
        for count in NUM_WORKERS:
            load = runs.load_of("chat", count, num_requests, seed)
            apart, together = runs.apart(policy, load), runs.one_scheduler(policy, load)
            rows.append(
                {"policy": policy, "workers": count, "apart": _latencies(apart), "together": _latencies(together)}
            )
    return rows


def _latencies(placed: Placed) -> dict[str, float]:
    figures = asdict(placed.figures)
    return {name: figures[name] for name in (*LATENCIES, "num_done", "num_requests")}


def hits(num_requests: int, seed: int, kinds: tuple[str, ...] = ("chat", "agents")) -> list[dict[str, Any]]:
    """Shares of cached prompt tokens on four workers, by placement, beside one big cache and a router that guesses."""
    rows = []
    for kind in kinds:
        load = runs.load_of(kind, OF_HITS, num_requests, seed)
        ways = {"one big pool": runs.one_big_pool("quire", load)}
        ways |= {placement: runs.one_scheduler("quire", load, placement) for placement in PLACEMENTS}
        ways["router that guesses"] = runs.routed("quire", load)
        rows += [
            {
                "workload": kind,
                "way": way,
                "hit_rate": placed.hit_rate,
                "imbalance": placed.imbalance,
                **_latencies(placed),
            }
            for way, placed in ways.items()
        ]
    return rows


def latency_table(rows: list[dict[str, Any]]) -> Table:
    """One row for each policy and number of workers."""
    table = Table(title="N workers under one scheduler, and the same load on N schedulers with one each: ms, and ratio")
    for name in ("policy", "workers", "TTFT p50", "TTFT p99", "TPOT p50", "TPOT p99"):
        table.add_column(name, justify="left" if name == "policy" else "right")
    for row in rows:
        cells = [
            f"{1e3 * row['together'][name]:.1f} ({row['together'][name] / row['apart'][name]:.2f})"
            for name in LATENCIES
        ]
        table.add_row(row["policy"], str(row["workers"]), *cells)
    return table


def hit_table(rows: list[dict[str, Any]]) -> Table:
    """One row for each workload and way of placing requests."""
    table = Table(title=f"Cached prompt tokens on {OF_HITS} workers, policy quire")
    for name in ("workload", "placement", "cached", "imbalance", "TTFT p50, ms", "TTFT p99, ms"):
        table.add_column(name, justify="left" if name in ("workload", "placement") else "right")
    for row in rows:
        table.add_row(
            row["workload"],
            row["way"],
            f"{100 * row['hit_rate']:.1f} %",
            f"{100 * row['imbalance']:.1f} %",
            f"{1e3 * row['ttft_p50_s']:.0f}",
            f"{1e3 * row['ttft_p99_s']:.0f}",
        )
    return table


if __name__ == "__main__":
    app = typer.Typer(add_completion=False, rich_markup_mode=None)
    app.command()(main)
    app()
