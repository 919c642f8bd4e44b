"""Measures what one gateway core relays to 256 streams, against bare grpc.aio writing as many messages.

    python -m benchmarks.relay --save      # about two minutes
    python -m benchmarks.relay --profile   # and where the time goes, by function
    python -m benchmarks.relay --steps 50 --repeats 1  # a short run

This module holds the runs and their table. The scheduler and the clients: benchmarks.relay.ends; the bare
server: benchmarks.relay.bare. docs/performance.md lists the goal as G1.
"""

import asyncio
import json
import os
import pstats
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import psutil
import typer
from rich.console import Console
from rich.table import Table

from benchmarks import report
from benchmarks.relay import bare as relay_bare
from benchmarks.relay.ends import Clients, Feed, Progress, ScriptedScheduler
from protos.engine.v1 import engine_pb2_grpc
from quire.local_stack.processes import child_environment
from svc_common.net import rpc

GOALS = {"single": 20_000, "coalesced": 100_000}
"""Tokens per second of the gateway's CPU time."""
_STOP_S = 30
_PROFILE_LINES = 45

_HELP_END = """
This process is the scheduler and the clients. A real gateway is measured first, then a bare grpc.aio server. Measured is the CPU
time of all threads of the gateway (or bare server); wall time and this process do not count. Each run is repeated --repeats times,
in turn; the table has the medians.

single: steps of one token per stream, each sent when all clients have received the previous one: one event per token. coalesced:
steps of --run tokens, up to --ahead in flight; an event has all tokens that arrived while the previous event was written. bare: one
incoming message is copied to all streams, paced like single, with messages of the same size.
"""


@dataclass(slots=True)
class Readings:
    """Readings of a process at the beginning and the end of the steps that count."""

    process: psutil.Process
    progress: Progress
    at: list[tuple[float, int, int, int]] = field(default_factory=list)

    def take(self) -> None:
        """Take a reading."""
        times, progress = self.process.cpu_times(), self.progress
        self.at.append((times.user + times.system, progress.num_tokens, progress.num_events, progress.num_bytes))

    def figures(self) -> dict[str, Any]:
        """Figures between the two readings."""
        cpu_s, tokens, events, num_bytes = (end - begin for begin, end in zip(*self.at, strict=True))
        return {
            "cpu_s": round(cpu_s, 2),
            "tokens": tokens,
            "events": events,
            "tokens_per_core_s": round(tokens / cpu_s) if cpu_s else 0,
            "us_per_event": round(1e6 * cpu_s / events, 1),
            "tokens_per_event": round(tokens / events, 2),
            "event_bytes": round(num_bytes / events),
        }


def main(
    streams: Annotated[int, typer.Option(min=1, help="At once.")] = 256,
    steps: Annotated[int, typer.Option(min=2, help="Steps of each run.")] = 300,
    run: Annotated[int, typer.Option(min=1, help="Tokens of each stream in a step of `coalesced`.")] = 16,
    ahead: Annotated[int, typer.Option(min=1, help="Maximum steps of `coalesced` in flight.")] = 4,
    connections: Annotated[int, typer.Option(min=1, help="Connections of the clients.")] = 8,
    repeats: Annotated[int, typer.Option(min=1, help="Repetitions of each run.")] = 3,
    profile: Annotated[
        bool, typer.Option("--profile", help="Run once more under cProfile and print times by function.")
    ] = False,
    save: Annotated[bool, typer.Option("--save", help="Write benchmarks/results/relay.json.")] = False,
) -> None:
    """Measures the number of tokens per second that one gateway core relays."""
    feeds = [Feed("single", streams, steps), Feed("coalesced", streams, steps, run, ahead)]
    console = Console()
    result = measure(feeds, connections, repeats)
    if save:
        report.save("relay", {"benchmark": "relay", "streams": streams, "run": run, "ahead": ahead, **result})
    _show(result, console)
    for feed in feeds if profile else ():
        console.print(f"\n{feed.name}, by function (seconds under the profiler):", highlight=False)
        console.print(_profiled(feed, connections), markup=False, highlight=False)


def measure(feeds: list[Feed], connections: int, repeats: int = 1) -> dict[str, Any]:
    """Send each feed through a gateway of its own, then the bare server; medians of `repeats` rounds."""
    rounds = [_round(feeds, connections) for _ in range(repeats)]
    runs = {name: _median([runs[name] for runs in rounds]) for name in rounds[0]}
    bare = runs["bare"]["us_per_event"]
    ratio = runs[feeds[0].name]["us_per_event"] / bare if bare else 0.0
    return {"runs": runs, "repeats": repeats, "single_to_bare": round(ratio, 2)}


def _round(feeds: list[Feed], connections: int) -> dict[str, dict[str, Any]]:
    runs = {feed.name: asyncio.run(_through_gateway(feed, connections, [])) for feed in feeds}
    first = feeds[0]
    bare = asyncio.run(_through_bare(first.streams, first.steps, runs[first.name]["event_bytes"], connections))
    return {**runs, "bare": bare}


def _median(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """The run with the median cost per event."""
    return sorted(runs, key=lambda figures: float(figures["us_per_event"]))[len(runs) // 2]


async def _through_gateway(feed: Feed, connections: int, python: list[str]) -> dict[str, Any]:
    """Run a fresh gateway between this scheduler and these clients. `python`: options of its interpreter."""
    progress = Progress()
    readings: list[Readings] = []

    def read() -> None:
        readings[0].take()

    scheduler = ScriptedScheduler(feed, progress, read)
    server = rpc.server()
    engine_pb2_grpc.add_EngineServiceServicer_to_server(scheduler, server)
    address = f"127.0.0.1:{rpc.bind(server, '127.0.0.1', 0, option='')}"
    await server.start()
    settings = {"schedulers": [address], "grpc_port": 0, "http_port": 0, "admin_port": 0, "admin_http_port": 0}
    command = [*python, "-m", "benchmarks.service", "gateway", json.dumps(settings)]
    try:
        with _started(command) as (pid, gateway):
            readings.append(Readings(psutil.Process(pid), progress))
            await Clients(gateway, connections).read_all(feed, progress)
    finally:
        await server.stop(0)
    return readings[0].figures()


async def _through_bare(streams: int, steps: int, event_bytes: int, connections: int) -> dict[str, Any]:
    progress = Progress()
    with _started(["-m", "benchmarks.relay.bare", str(streams)]) as (pid, address):
        readings, clients = Readings(psutil.Process(pid), progress), Clients(address, connections)

        async def messages() -> AsyncIterator[bytes]:
            for step in range(steps):
                await progress.until(step * streams)
                if step == max(1, steps // 10):
                    readings.take()
                yield b"x" * event_bytes
            await progress.until(steps * streams)
            readings.take()

        reading = asyncio.create_task(clients.read_bytes(relay_bare.READ, streams, progress))
        await clients.send_bytes(relay_bare.FEED, messages())
        await reading
        await clients.close()
    return readings.figures()


@contextmanager
def _started(command: list[str]) -> Iterator[tuple[int, str]]:
    """Start a service process: its pid and HOST:PORT. Raises RuntimeError if it ends before it listens."""
    environment = child_environment(os.environ)
    process = subprocess.Popen([sys.executable, *command], stdout=subprocess.PIPE, env=environment, text=True)
    try:
        line = process.stdout.readline() if process.stdout else ""
        if not line.startswith("service "):
            raise RuntimeError(f"{command[-1]} ended with status {process.wait(_STOP_S)} before it listened")
        yield process.pid, line.strip().rpartition("address=")[2]
    finally:
        process.terminate()
        process.communicate(timeout=_STOP_S)


def _profiled(feed: Feed, connections: int) -> str:
    """The functions with the largest own time."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "profile"
        asyncio.run(_through_gateway(feed, connections, ["-m", "cProfile", "-o", str(path)]))
        with (Path(folder) / "text").open("w+") as text:
            pstats.Stats(str(path), stream=text).strip_dirs().sort_stats("tottime").print_stats(_PROFILE_LINES)
            text.seek(0)
            return text.read()


def _show(result: dict[str, Any], console: Console) -> None:
    table = Table("", "tokens/s per core", "goal", "tokens per event", "us per event", "bytes", "CPU s")
    for name, figures in result["runs"].items():
        goal = GOALS.get(name)
        table.add_row(
            name,
            f"{figures['tokens_per_core_s']:,}",
            f"{goal:,}" if goal else "",
            f"{figures['tokens_per_event']:.1f}",
            f"{figures['us_per_event']:.1f}",
            f"{figures['event_bytes']}",
            f"{figures['cpu_s']:.2f}",
        )
    console.print(table)
    console.print(f"an event of single costs {result['single_to_bare']:.2f} times a bare message")


if __name__ == "__main__":
    app = typer.Typer(add_completion=False, rich_markup_mode=None)
    app.command(epilog=_HELP_END)(main)
    app()
