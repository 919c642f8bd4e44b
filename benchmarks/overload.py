"""Measures how five times the servable number of requests affects those that are served.

    python -m benchmarks.overload --save            # about two minutes
    python -m benchmarks.overload --seconds 5       # a short run

This module holds the runs and their table. The client: benchmarks.open_load; the services:
benchmarks.service.
"""

import asyncio
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from benchmarks import report
from benchmarks.open_load import Flow, OpenLoad, figures
from benchmarks.service import Stack

LOADS = (0.8, 5.0)
_WORKER = {"step_base_s": 0.02, "prefill_token_s": 10e-6, "decode_row_s": 50e-6, "num_gpu_blocks": 8_192}

_HELP_END = """
Three processes and this client, on one machine; the simulated worker takes 20 ms per step. Capacity: requests per second completed
for --max-num-seqs clients, each sending the next request when one ends. Then Poisson arrivals at 0.8 and 5 times the capacity. The
queue accepts requests that start within --max-waiting-s and refuses the rest. Times to first token of served requests and to the
error of refused ones are measured at the client. The first tenth of each run does not count.

Goals: p99 of the time to first token at 5 times at most twice that at 0.8; goodput at least 95 % of the peak (the capacity);
refusals within 10 ms, each with a retry time.
"""


def main(
    seconds: Annotated[float, typer.Option(min=1, help="Seconds of each run.")] = 30.0,
    max_num_seqs: Annotated[int, typer.Option(min=1, help="Concurrent sequences.")] = 16,
    max_waiting_s: Annotated[
        float, typer.Option(min=0.01, help="Maximum expected waiting time of an accepted request.")
    ] = 0.1,
    seed: Annotated[int, typer.Option(help="Seed of the arrivals.")] = 1,
    save: Annotated[bool, typer.Option("--save", help="Write benchmarks/results/overload.json.")] = False,
) -> None:
    """Measures time to first token, goodput and refusals at 0.8 and at 5 times the capacity."""
    result = measure(seconds, max_num_seqs, max_waiting_s, seed)
    if save:
        report.save("overload", {"benchmark": "overload", "max_num_seqs": max_num_seqs, **result})
    _show(result, Console())


def measure(seconds: float, max_num_seqs: int, max_waiting_s: float, seed: int) -> dict[str, Any]:
    """Measure the capacity, then each load on the same stack."""
    scheduler = {"max_num_seqs": max_num_seqs, "max_waiting_s": max_waiting_s}
    with Stack(_WORKER, scheduler) as stack:
        full = Flow("capacity", 0.0, num_clients=max_num_seqs + max(1, max_num_seqs // 4))
        peak = _run(stack.address, full, seconds, seed)["served_per_s"]
        loads = {str(load): _run(stack.address, Flow("all", load * peak), seconds, seed) for load in LOADS}
    low, high = (loads[str(load)] for load in LOADS)
    return {
        "max_waiting_s": max_waiting_s,
        "capacity_per_s": peak,
        "loads": loads,
        "ttft_p99_ratio": round(high["ttft_s"]["p99"] / low["ttft_s"]["p99"], 3),
        "goodput_share": round(high["served_per_s"] / peak, 3),
    }


def _run(address: str, flow: Flow, seconds: float, seed: int) -> dict[str, Any]:
    async def run() -> dict[str, Any]:
        return figures(await OpenLoad(address, seed).run([flow], seconds), seconds)

    return asyncio.run(run())


def _show(result: dict[str, Any], console: Console) -> None:
    table = Table("load", "served/s", "TTFT p50 ms", "TTFT p99 ms", "refused p50 ms", "refused p99 ms", "ends")
    for load, f in result["loads"].items():
        ends = ", ".join(f"{count} {end}" for end, count in f["ends"].items())
        cells = (
            _ms(f["ttft_s"], "p50"),
            _ms(f["ttft_s"], "p99"),
            _ms(f["refused_s"], "p50"),
            _ms(f["refused_s"], "p99"),
        )
        table.add_row(f"{load} x", f"{f['served_per_s']:.1f}", *cells, ends)
    console.print(table)
    console.print(
        f"capacity {result['capacity_per_s']:.1f}/s; TTFT p99 at 5 / at 0.8: {result['ttft_p99_ratio']:.2f} (goal 2); "
        f"goodput: {result['goodput_share']:.1%} of it (goal 95 %)"
    )


def _ms(found: dict[str, float], name: str) -> str:
    return f"{1e3 * found[name]:,.1f}" if found else ""


if __name__ == "__main__":
    app = typer.Typer(add_completion=False, rich_markup_mode=None)
    app.command(epilog=_HELP_END)(main)
    app()
