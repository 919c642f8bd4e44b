"""Measures a sum over processes on one host: through shared memory, and by Gloo, in the same run.

    python -m benchmarks.all_reduce                        # a table
    python -m benchmarks.all_reduce --sizes 1x576,64x576   # rows x elements of a row
    python -m benchmarks.all_reduce --json                 # one JSON object, nothing else

Each process has one thread, on a processor of its own. Rounds of both are taken in turn; a figure is microseconds of one sum.
"""

import json
import multiprocessing
import os
import re
import socket
import sys
import time
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from typing import Annotated, Any

import torch
import torch.distributed as dist
import typer
from rich.console import Console
from rich.table import Table

from benchmarks import report
from paged_kernels.cpu_library import load_library
from paged_kernels.ranks import SharedFile, SharedSums, shared_bytes

_SIZE = re.compile(r"(\d+)x(\d+)")
_WARM_UP = 50
WAYS = ("shared memory", "Gloo")


def sizes_of(text: str) -> list[tuple[int, int]]:
    """(rows, width) of "ROWSxWIDTH,..."; usage error for other texts."""
    found = [_SIZE.fullmatch(part.strip()) for part in text.split(",")]
    sizes = [(int(match[1]), int(match[2])) for match in found if match]
    if len(sizes) < len(found) or any(not rows or not width for rows, width in sizes):
        raise typer.BadParameter(f"{text!r} is not a list of ROWSxWIDTH, such as 1x576,64x576")
    return sizes


def _timed(call: Any, count: int) -> list[float]:
    times = []
    for _ in range(count):
        begin_ns = time.perf_counter_ns()
        call()
        times.append((time.perf_counter_ns() - begin_ns) / 1e3)
    return times


def _work(
    rank: int, size: int, port: int, path: str, sizes: list[tuple[int, int]], rounds: int, to: Connection | None
) -> None:
    """One process: each size in `rounds` rounds; rank 0 sends its times by way and size."""
    torch.set_num_threads(1)
    library = load_library(os.environ, lambda _line: None)
    sums = SharedSums(library, SharedFile.opened(path, shared_bytes(library, size)), rank, size)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=size)
    _pin(rank, size)  # Gloo has started its own threads, which stay free
    found: dict[str, dict[str, list[float]]] = {way: {} for way in WAYS}
    for rows, width in sizes:
        values = torch.ones(rows, width, dtype=torch.bfloat16)
        # Zero, so that values stay what they are.
        values.zero_()
        ways = dict(zip(WAYS, (lambda v=values: sums.all_reduce(v), lambda v=values: dist.all_reduce(v)), strict=True))
        for _ in range(rounds):
            for way, call in ways.items():
                _timed(call, _WARM_UP)
                found[way].setdefault(f"{rows}x{width}", []).extend(_timed(call, 10 * _WARM_UP))
    dist.destroy_process_group()
    if to is not None:
        to.send(found)


def _pin(rank: int, size: int) -> None:
    """Give each process a processor of its own, where there are enough."""
    allowed = sorted(os.sched_getaffinity(0))
    if len(allowed) >= size:
        os.sched_setaffinity(0, {allowed[rank]})


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def measure(size: int, sizes: list[tuple[int, int]], rounds: int) -> dict[str, dict[str, list[float]]]:
    """Microseconds of each sum at rank 0, by way and "ROWSxWIDTH"."""
    shared = SharedFile.created(shared_bytes(load_library(os.environ, lambda _line: None), size))
    context, port = multiprocessing.get_context("spawn"), _free_port()
    here, there = context.Pipe()
    try:
        processes: list[SpawnProcess] = [
            context.Process(
                target=_work, args=(rank, size, port, str(shared.path), sizes, rounds, there if rank == 0 else None)
            )
            for rank in range(size)
        ]
        for process in processes:
            process.start()
        there.close()
        found: dict[str, dict[str, list[float]]] = here.recv()
        for process in processes:
            process.join()
    finally:
        shared.unlink()
    return found


app = typer.Typer(rich_markup_mode="rich", add_completion=False)


@app.command()
def main(
    sizes: Annotated[str, typer.Option(help="Tensors: rows x elements of a row.")] = "1x576,64x576",
    ranks: Annotated[int, typer.Option(help="Processes.", min=2, max=8)] = 2,
    rounds: Annotated[int, typer.Option(help="Rounds of 500 sums each.", min=1)] = 4,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object, nothing else.")] = False,
) -> None:
    """Measure sums over processes."""
    found = measure(ranks, sizes_of(sizes), rounds)
    times = {
        way: {name: report.spread(values, 1) for name, values in by_size.items()} for way, by_size in found.items()
    }
    if as_json:
        content = {**report.provenance(), "ranks": ranks, "dtype": "bfloat16", "microseconds": times}
        sys.stdout.write(json.dumps(content, indent=2) + "\n")
        return
    table = Table("bfloat16", *(f"{way}, us (p99)" for way in WAYS), "times faster")
    for name in times[WAYS[0]]:
        ours, gloo = (times[way][name] for way in WAYS)
        table.add_row(
            name, *(f"{one['p50']:.1f} ({one['p99']:.1f})" for one in (ours, gloo)), f"{gloo['p50'] / ours['p50']:.1f}"
        )
    Console().print(table)


if __name__ == "__main__":
    app()
