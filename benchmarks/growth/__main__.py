"""Checks gateway, scheduler and worker for growth of memory, descriptors and threads over many requests.

    python -m benchmarks.growth --save --plot benchmarks/results/growth.png    # 10,000 requests, then 1,000 on models/tiny
    python -m benchmarks.growth --requests 1000 --runs simulated                # a short run

This module holds the command line and its tables. The load: benchmarks.growth.load. The fitted lines:
benchmarks.growth.fit.
"""

import asyncio
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import psutil
import typer
from rich.console import Console
from rich.table import Table

from benchmarks import command_line, report
from benchmarks.growth import fit as growth_fit
from benchmarks.growth.fit import Samples
from benchmarks.growth.load import ADAPTER, KINDS, Load
from quire.built_in_model import default_model
from quire.local_stack.stack import LocalStack
from quire.operators.admin import AdminClient

RUNS = ("simulated", "tiny")
_NUM_SAMPLES = 50
_CACHE_MIB = 64
_SMALL_LOGS = ("--record-memory", "1MiB", "--max-logged-steps", "500", "--max-logged-events", "5000")
_TINY_SHARE = 10
_MIB = 2**20

_HELP_END = """
Request kinds, in turn: greedy, sampled, two samples, beams, a JSON schema (100 different ones), logprobs, a stop string, a client
that disconnects, a refused request, an adapter (simulated only); each with a priority and a label.

Bounded buffers are full after the warm-up: 500 logged steps, 5,000 logged events and 1 MiB of recordings instead of the default
10,000, 65,536 and 64 MiB; 100 grammars; 1,024 words in the tokenizer's cache; all blocks of the KV cache.

A quantity grows if the line through its samples rises by more than 100 KiB, half a descriptor or a fifth of a thread per 1,000
requests, and by more than three standard errors. The exit status is then 1.
"""


def main(
    requests: Annotated[
        int, typer.Option(min=100, help="Measured requests on the simulated worker; a tenth of it on models/tiny.")
    ] = 10_000,
    warmup: Annotated[int, typer.Option(min=0, help="Warm-up requests; a tenth of it on models/tiny.")] = 2_000,
    clients: Annotated[int, typer.Option(min=1, max=256, help="Concurrent requests.")] = 16,
    runs: Annotated[str, typer.Option(help=f"Runs, comma-separated: {', '.join(RUNS)}.")] = ",".join(RUNS),
    save: Annotated[bool, typer.Option("--save", help="Write benchmarks/results/growth.json.")] = False,
    plot: Annotated[Path | None, typer.Option(help="File of a plot of memory over requests: PNG, PDF or SVG.")] = None,
) -> None:
    """Checks the services for growth over many requests of all kinds."""
    names = list(dict.fromkeys(runs.split(",")))
    if unknown := [name for name in names if name not in RUNS]:
        raise typer.BadParameter(f"unknown run {unknown[0]!r}; runs: {', '.join(RUNS)}", param_hint="--runs")
    console, results, samples = Console(), {}, {}
    for name in names:
        share = _TINY_SHARE if name == "tiny" else 1
        results[name], samples[name] = measure(name, requests // share, warmup // share, clients)
        _show(name, results[name], console)
    if save:
        report.save("growth", {"benchmark": "growth", "clients": clients, "runs": results})
    if plot is not None:
        growth_fit.draw(samples, plot)
    growing = [f"{name}: {what}" for name, result in results.items() for what in result["growing"]]
    console.print(f"grows: {'; '.join(growing)}" if growing else "nothing grows")
    if growing:
        raise typer.Exit(1)


def measure(name: str, requests: int, warmup: int, clients: int) -> tuple[dict[str, Any], Samples]:
    """One run: its figures, and the samples behind them."""
    is_real = name == "tiny"
    with _stack(is_real=is_real) as stack, command_line.progress(name, requests + warmup) as tick:
        samples, every = Samples(stack.pids), max(1, requests // _NUM_SAMPLES)

        def on_done(num_done: int) -> None:
            tick()
            if num_done >= warmup and (num_done - warmup) % every == 0:
                samples.take(num_done - warmup)

        kinds = tuple(kind for kind in KINDS if kind != "adapter" or not is_real)
        load = Load(stack.grpc_address, kinds, on_done)
        asyncio.run(load.send(requests + warmup, clients))
        lines = samples.lines()
        result = {
            "requests": requests,
            "warmup": warmup,
            "ends": dict(sorted(load.ends.items())),
            "lines": lines,
            "growing": [f"{p} {q}" for p, of_p in lines.items() for q, found in of_p.items() if found["grows"]],
        }
        return ({**result, "worker_memory_mib": _account(stack.pids["worker"])} if is_real else result), samples


@contextmanager
def _stack(*, is_real: bool) -> Iterator[LocalStack]:
    worker = ("--kv-cache-memory", f"{_CACHE_MIB}MiB") if is_real else ("--time-scale", "0")
    with LocalStack(simulated=not is_real, worker_args=worker, scheduler_args=_SMALL_LOGS) as stack:
        if not is_real:
            with AdminClient(stack.admin_address) as admin:
                admin.load_adapter(ADAPTER, "/adapters/simulated")
        yield stack


def _account(pid: int) -> dict[str, float]:
    """Resident memory of a worker with a model, MiB, and its known parts: libraries, weights, cache (as far as used)."""
    weights = sum(file.stat().st_size for file in default_model().glob("*.safetensors")) / _MIB
    resident, libraries = psutil.Process(pid).memory_info().rss / _MIB, _libraries_mib()
    rest = resident - libraries - weights - _CACHE_MIB
    account = {"resident": resident, "libraries": libraries, "weights": weights, "cache": _CACHE_MIB, "rest": rest}
    return {name: round(value, 1) for name, value in account.items()}


def _libraries_mib() -> float:
    """Memory of a process that only imports what a worker imports."""
    code = "import psutil, worker_svc.app, worker_svc.executor.model_engine; print(psutil.Process().memory_info().rss)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    return int(done.stdout) / _MIB


def _show(name: str, result: dict[str, Any], console: Console) -> None:
    console.print(f"{name}: {result['requests']:,} requests after {result['warmup']:,}", highlight=False)
    table = Table("process", "", "first", "last", "per 1,000 requests", "")
    for process, of_process in result["lines"].items():
        for quantity, found in of_process.items():
            rise = f"{found['per_1000']:+,.2f} ± {found['error']:,.2f}"
            cells = (f"{found['first']:,.0f}", f"{found['last']:,.0f}", rise, "grows" if found["grows"] else "")
            table.add_row(process, quantity, *cells)
    console.print(table)
    if "worker_memory_mib" in result:
        account = ", ".join(f"{what} {mib:,.0f}" for what, mib in result["worker_memory_mib"].items())
        console.print(f"worker, MiB: {account}", highlight=False)
    for end, count in result["ends"].items():
        console.print(f"  {count:6,} x {end}", markup=False, highlight=False)


if __name__ == "__main__":
    app = typer.Typer(add_completion=False, rich_markup_mode=None)
    app.command(epilog=_HELP_END)(main)
    app()
