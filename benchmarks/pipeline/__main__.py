"""Measures two stages of a pipeline, with one batch and with two batches in flight, beside one process, in the same run.

    python -m benchmarks.pipeline                                   # a table
    python -m benchmarks.pipeline --model bench-15m --output 16     # a short run
    python -m benchmarks.pipeline --json                            # one JSON object, nothing else

Each process has one thread. All stacks run, and get the same requests in turn; a figure is output tokens per second of a round.
"""

import asyncio
import json
import sys
import time
from contextlib import ExitStack
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from benchmarks import report
from benchmarks.compare import checkpoints, shapes
from benchmarks.compare.wires import GrpcWire
from benchmarks.compare.workloads import Lengths, Workload, drawn, fixed
from quire.local_stack.stack import LocalStack
from quire_tools.bench.measure import Record

WAYS: dict[str, dict[str, Any]] = {
    "one process": {},
    "two stages, one batch in flight": {"pipeline_parallel": 2, "scheduler_args": ("--no-overlap",)},
    "two stages, two batches in flight": {"pipeline_parallel": 2},
}


def _stack(name: str, folder: Any, requests: int) -> LocalStack:
    way = WAYS[name]
    batches = ("infer.pp_size=2",) if "pipeline_parallel" in way else ()
    policy = (f"infer.max_reqs={requests}", *batches)
    return LocalStack(model=folder, policy="chitu", policy_set=policy, worker_args=("--num-threads", "1"), **way)


async def _ask_all(address: str, workload: Workload) -> None:
    wire = GrpcWire(address)
    try:
        calls = [wire.ask(request, Record(request.index, 0.0), time.monotonic) for request in workload.requests]
        await asyncio.gather(*calls)
    finally:
        await wire.close()


def measure(model: str, lengths: Lengths, rounds: int) -> dict[str, list[float]]:
    """Output tokens per second of each round, by way. A round more warms up."""
    _, shape = shapes.parse(model)
    folder, found = checkpoints.made(model, 0, checkpoints.cache_folder()), {name: [] for name in WAYS}
    workloads = [drawn("W1", lengths, seed=0, round_=i, vocab_size=shape.vocab_size) for i in range(rounds + 1)]
    with ExitStack() as running:
        stacks = {name: running.enter_context(_stack(name, folder, len(workloads[0].requests))) for name in WAYS}
        for workload in workloads:
            for name, stack in stacks.items():
                began = time.monotonic()
                asyncio.run(_ask_all(stack.grpc_address, workload))
                num_tokens = sum(request.max_tokens for request in workload.requests)
                found[name].append(num_tokens / (time.monotonic() - began))
    return {name: speeds[1:] for name, speeds in found.items()}


app = typer.Typer(rich_markup_mode="rich", add_completion=False)


@app.command()
def main(
    model: Annotated[str, typer.Option(help="bench-135m, bench-15m or a shape (python -m benchmarks.compare).")] = (
        "bench-135m"
    ),
    requests: Annotated[int, typer.Option(help="At once.", min=2)] = 32,
    prompt: Annotated[int, typer.Option(help="Tokens.", min=1)] = 64,
    output: Annotated[int, typer.Option(help="Tokens.", min=2)] = 64,
    rounds: Annotated[int, typer.Option(min=1)] = 3,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object, nothing else.")] = False,
) -> None:
    """Measure stages of a pipeline."""
    found = measure(model, Lengths(requests, fixed(prompt), fixed(output)), rounds)
    speeds = {name: report.spread(values, 1) for name, values in found.items()}
    if as_json:
        sizes = {"model": model, "requests": requests, "prompt": prompt, "output": output}
        sys.stdout.write(json.dumps({**report.provenance(), **sizes, "tokens_per_s": speeds}, indent=2) + "\n")
        return
    table = Table(f"{model}, {requests} requests", "tokens/s", "of one process")
    for name, speed in speeds.items():
        table.add_row(name, f"{speed['p50']:.0f}", f"{speed['p50'] / speeds['one process']['p50']:.2f}")
    Console().print(table)


if __name__ == "__main__":
    app()
