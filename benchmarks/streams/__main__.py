"""Measures how many streams one gateway process holds, and the cost of each.

    python -m benchmarks.streams --save                      # 10,000 streams, 1,000 of them not read, about five minutes
    python -m benchmarks.streams --streams 500 --step-s 0.5  # a short run

This module holds the stack, the runs and the table. The streams themselves: benchmarks.streams.client.
"""

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Annotated, Any

import psutil
import typer
from rich.console import Console
from rich.table import Table

from benchmarks import report
from benchmarks.streams.client import STREAMS_PER_CHANNEL
from quire.local_stack.stack import LocalStack

GOAL_KIB = 30.0
SLOW_GOAL_KIB = 256.0
_LIMIT_S = 1_800
_STEP_BASE_S, _ROW_S = 4e-3, 20e-6
"""Duration of a simulated step, and of each sequence in it, at time scale 1."""

_HELP_END = """
Four processes and the clients, on one machine. The simulated worker computes a step of all streams in --step-s, which is the time
that the gateway has for one event per stream. Memory: resident memory of the gateway with all streams open and decoding, minus that
before the first stream (after 64 others), per stream. Gaps: time between events of a stream, at clients that read.

fast: all clients read. slow: some read two events and then nothing until the others have ended.
"""


def main(
    streams: Annotated[int, typer.Option(min=2, help="At once.")] = 10_000,
    slow: Annotated[
        int, typer.Option(min=0, help="Streams among them that are not read, in the second run; 0 = no second run.")
    ] = 1_000,
    tokens: Annotated[int, typer.Option(min=2, help="Output tokens of each stream.")] = 12,
    step_s: Annotated[float, typer.Option(min=0.0, help="Duration in seconds of a step of all streams.")] = 5.0,
    clients: Annotated[int, typer.Option(min=1, help="Client processes.")] = 2,
    save: Annotated[bool, typer.Option("--save", help="Write benchmarks/results/streams.json.")] = False,
) -> None:
    """Measures memory and gaps of many streams at one gateway."""
    plan = {"fast": 0} | ({"slow": slow} if slow else {})
    runs = {name: measure(streams, num_slow, tokens, step_s, clients) for name, num_slow in plan.items()}
    if save:
        report.save("streams", {"benchmark": "streams", "streams": streams, "step_s": step_s, "runs": runs})
    _show(runs, Console())


def measure(streams: int, slow: int, tokens: int, step_s: float, clients: int) -> dict[str, Any]:
    """Start a stack, open all streams at once and measure their cost."""
    blocks = streams * (16 + tokens + 16) // 16 + 1_024
    scale = step_s / (_STEP_BASE_S + streams * _ROW_S)
    budget = str(max(8_192, 2 * streams))
    with LocalStack(
        simulated=True,
        worker_args=("--time-scale", f"{scale:.4f}", "--num-gpu-blocks", str(blocks)),
        scheduler_args=("--max-num-seqs", str(streams), "--max-num-batched-tokens", budget),
    ) as stack:
        gateway = psutil.Process(stack.pids["gateway"])
        with _started(stack.grpc_address, 64, 0, 2, 1) as warm_up:
            _figures(warm_up)
        before = _memory(gateway)
        with _started(stack.grpc_address, streams, slow, tokens, clients) as processes:
            for process in processes:
                _line(process, "opened")
            opened = _memory(gateway)
            ended = _figures(processes)
        time.sleep(1.0)
        after = _memory(gateway)
    return {
        "streams": streams,
        "slow": slow,
        "kib_per_stream": round((opened - before) / 1024 / streams, 1),
        "rss_before_mib": round(before / 2**20, 1),
        "rss_open_mib": round(opened / 2**20, 1),
        "rss_after_mib": round(after / 2**20, 1),
        "clients": ended,
    }


@contextmanager
def _started(address: str, streams: int, slow: int, tokens: int, clients: int) -> Iterator[list[subprocess.Popen[str]]]:
    """Client processes with a share of the streams each."""
    with ExitStack() as exits:
        processes = []
        for i in range(clients):
            options = {"--streams": _part(streams, clients, i), "--slow": _part(slow, clients, i), "--tokens": tokens}
            flat = [str(part) for pair in options.items() for part in pair]
            command = [sys.executable, "-m", "benchmarks.streams.client", address, *flat]
            process = exits.enter_context(subprocess.Popen(command, stdout=subprocess.PIPE, text=True))
            exits.callback(process.kill)
            processes.append(process)
        yield processes


def _part(total: int, parts: int, number: int) -> int:
    return total // parts + (number < total % parts)


def _line(process: "subprocess.Popen[str]", what: str) -> dict[str, Any]:
    """The next line with this `what`. Raises RuntimeError if the client ends before."""
    for text in process.stdout or ():
        told: dict[str, Any] = json.loads(text)
        if told["what"] == what:
            return told
    raise RuntimeError(f"a client ended with status {process.wait(_LIMIT_S)} before it reported {what}")


def _figures(processes: "list[subprocess.Popen[str]]") -> list[dict[str, Any]]:
    found = [_line(process, "ended") for process in processes]
    for process in processes:
        process.wait(_LIMIT_S)
    return found


def _memory(process: psutil.Process) -> int:
    rss: int = process.memory_info().rss
    return rss


def _show(runs: dict[str, dict[str, Any]], console: Console) -> None:
    table = Table("", "streams", "KiB each", "opened in s", "gap p50 s", "gap p99 s", "ends")
    for name, run in runs.items():
        of_clients = run["clients"]
        ends = ", ".join(f"{count} {end}" for client in of_clients for end, count in client["ends"].items())
        table.add_row(
            name,
            f"{run['streams']:,}",
            f"{run['kib_per_stream']:.1f} (goal {GOAL_KIB:g})",
            f"{max(client['opened_s'] for client in of_clients):.1f}",
            f"{max(client['gaps_s']['p50'] for client in of_clients):.2f}",
            f"{max(client['gaps_s']['p99'] for client in of_clients):.2f}",
            ends,
        )
    console.print(table)
    console.print(f"{STREAMS_PER_CHANNEL} streams per connection; slow streams may cost {SLOW_GOAL_KIB:g} KiB each")


if __name__ == "__main__":
    app = typer.Typer(add_completion=False, rich_markup_mode=None)
    app.command(epilog=_HELP_END)(main)
    app()
