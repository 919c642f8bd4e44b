"""Measures how long streams pause when a service is killed or stopped, and how soon a stopped one is noticed.

    python -m benchmarks.pauses --kills 30 --save      # about 25 minutes
    python -m benchmarks.pauses --kills 3 --json       # a short run

This module holds the faults, the streams and the table. Services are restarted as `quire up` does.
"""

import json
import os
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from benchmarks import report
from quire import SamplingParams
from quire.client.sync_client import Client
from quire.local_stack.restarts import RestartRules
from quire.local_stack.stack import LocalStack
from svc_common import health_probe

GOALS_S = {
    "scheduler killed: pause": (3.0, 5.0),
    "scheduler stopped: noticed": (None, 2.5),
    "worker stopped: noticed": (None, 2.5),
    "worker stopped: pause": (None, 4.0),
}
"""p50 and p99; None = no goal."""
NUM_STREAMS = 4
_REVIVE_S = 0.1
_POLL_S = 0.01
_PATIENCE_S = 60.0
_NUM_TOKENS = 400
_STEADY_S = 0.5

_HELP_END = """
Four streams run all the time; each is restarted when it ends. Faults are injected at random moments, after all streams have run
steadily for --rest seconds. Pause: of each stream, the longest gap between two of its tokens from the fault on. Noticed: from
SIGSTOP until the health service of the service in front of the stopped one reports NOT_SERVING; then the process is continued
(SIGCONT). Services are restarted as by `quire up`, with a delay that grows with consecutive exits.

Goals: pause after a killed scheduler 3 s p50 and 5 s p99, after a stopped worker 4 s p99; noticed within 2.5 s.
"""


@dataclass(slots=True)
class Stream:
    """Token times of one client that always reads: the last token, and the gaps since `watch`."""

    last_s: float = 0.0
    longest_gap_s: float = 0.0
    steady_since_s: float = 0.0
    is_over: bool = False

    def read(self, address: str, seed: int) -> None:
        """Send request after request until `is_over`."""
        params = SamplingParams(temperature=0.8, seed=seed, max_tokens=_NUM_TOKENS, ignore_eos=True)
        with Client(address) as client:
            while not self.is_over:
                for _ in client.generate_stream("def main():", params, timeout_s=_PATIENCE_S):
                    self._arrived(time.monotonic())

    def _arrived(self, now_s: float) -> None:
        gap_s = now_s - self.last_s
        self.longest_gap_s = max(self.longest_gap_s, gap_s)
        if gap_s > _STEADY_S:
            self.steady_since_s = now_s
        self.last_s = now_s

    def watch(self, now_s: float) -> None:
        """Count gaps from now on; a gap in progress counts in full."""
        self.longest_gap_s, self.steady_since_s = 0.0, now_s

    def is_steady(self, now_s: float, rest_s: float) -> bool:
        """True if tokens have arrived for `rest_s` seconds without a notable gap."""
        return now_s - self.last_s < _STEADY_S and now_s - self.steady_since_s >= rest_s


@dataclass(slots=True)
class Figures:
    """Measured seconds by name."""

    seconds: dict[str, list[float]] = field(default_factory=dict)

    def add(self, name: str, values: Sequence[float]) -> None:
        """Add values."""
        self.seconds.setdefault(name, []).extend(values)

    def as_json(self) -> dict[str, dict[str, float]]:
        """Count, median, p99 and maximum of each name."""
        return {name: {"count": len(values), **report.spread(values, 3)} for name, values in self.seconds.items()}


class Harms:
    """Injects faults into a running stack and measures the pauses of its streams."""

    def __init__(self, stack: LocalStack, streams: Sequence[Stream], seed: int, rest_s: float) -> None:
        self._stack = stack
        self._streams = streams
        self._draw = random.Random(seed)
        self._rest_s = rest_s
        self.figures = Figures()

    def kill(self, name: str) -> None:
        """Send SIGKILL; the service is restarted."""
        self._befall(name, f"{name} killed: pause", signal.SIGKILL)

    def stop(self, name: str, watched: str) -> None:
        """Send SIGSTOP until the service at `watched` reports that it cannot serve."""

        def until_noticed(pid: int, since_s: float) -> None:
            try:
                self._until(lambda: health_probe.probe(watched) != "SERVING")
                self.figures.add(f"{name} stopped: noticed", [time.monotonic() - since_s])
            finally:
                os.kill(pid, signal.SIGCONT)

        self._befall(name, f"{name} stopped: pause", signal.SIGSTOP, until_noticed)

    def _befall(
        self,
        name: str,
        figure: str,
        number: int,
        then: Callable[[int, float], None] = lambda pid, since_s: None,
    ) -> None:
        time.sleep(self._draw.uniform(0, 0.5))
        pid, since_s = self._stack.pids[name], time.monotonic()
        for stream in self._streams:
            stream.watch(since_s)
        os.kill(pid, number)
        then(pid, since_s)
        self.rest()
        self.figures.add(figure, [stream.longest_gap_s for stream in self._streams])

    def rest(self) -> None:
        """Wait until all streams have been steady for a while."""
        self._until(lambda: all(stream.is_steady(time.monotonic(), self._rest_s) for stream in self._streams))

    def _until(self, condition: Callable[[], bool]) -> None:
        deadline_s = time.monotonic() + _PATIENCE_S
        while not condition():
            if time.monotonic() > deadline_s:
                raise RuntimeError(f"streams did not continue, or the fault was not noticed, within {_PATIENCE_S:g} s")
            time.sleep(_POLL_S)


def measure(kills: int, seed: int, rest_s: float, *, simulated: bool, model: Path | None = None) -> dict[str, Any]:
    """Inject each fault `kills` times, all on one stack."""
    rules = replace(RestartRules(), max_deaths=1_000_000)
    with LocalStack(model=model, simulated=simulated, restart=rules) as stack, _revived(stack), _read(stack) as streams:
        harms = Harms(stack, streams, seed, rest_s)
        harms.rest()
        for _ in range(kills):
            harms.kill("scheduler")
            harms.stop("scheduler", stack.grpc_address)
            harms.stop("worker", stack.scheduler_address)
            harms.kill("worker")
    return {"kills": kills, "rest_s": rest_s, "simulated": simulated, "seconds": harms.figures.as_json()}


@contextmanager
def _revived(stack: LocalStack) -> Iterator[None]:
    """Restart dead services inside the context, polling as often as `quire up` does."""
    stop = threading.Event()

    def revive() -> None:
        while not stop.wait(_REVIVE_S):
            stack.revive()

    with ThreadPoolExecutor(1, thread_name_prefix="revive") as thread:
        reviving = thread.submit(revive)
        try:
            yield
        finally:
            stop.set()
    reviving.result()


@contextmanager
def _read(stack: LocalStack) -> Iterator[list[Stream]]:
    """Streams that are read inside the context."""
    streams = [Stream(last_s=time.monotonic()) for _ in range(NUM_STREAMS)]
    with ThreadPoolExecutor(NUM_STREAMS, thread_name_prefix="stream") as threads:
        reading: list[Future[None]] = [
            threads.submit(stream.read, stack.grpc_address, seed) for seed, stream in enumerate(streams)
        ]
        try:
            yield streams
        finally:
            for stream in streams:
                stream.is_over = True
    for done in reading:
        done.result()


def main(
    kills: Annotated[int, typer.Option(min=1, help="Number of injections of each fault.")] = 5,
    rest: Annotated[float, typer.Option(min=0, help="Seconds of steady streams between two faults.")] = 2.0,
    seed: Annotated[int, typer.Option(help="Seed of the moments of faults.")] = 1,
    model: Annotated[Path | None, typer.Option(help="Checkpoint folder; default: the built-in model.")] = None,
    simulated: Annotated[bool, typer.Option("--simulated", help="Use the simulated worker.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    save: Annotated[bool, typer.Option("--save", help="Write benchmarks/results/pauses.json.")] = False,
) -> None:
    """Measures the pauses of streams when services are killed or stopped."""
    result = {"benchmark": "pauses", **measure(kills, seed, rest, simulated=simulated, model=model)}
    if save:
        report.save("pauses", result)
    if as_json:
        print(json.dumps(result, indent=2))
    else:
        _show(result["seconds"], Console())


def _show(seconds: dict[str, dict[str, float]], console: Console) -> None:
    table = Table("", "count", "p50 s", "p99 s", "longest s", "goal p50, p99")
    for name, found in seconds.items():
        goals = " ".join("" if goal is None else f"{goal:g}" for goal in GOALS_S.get(name, ()))
        table.add_row(name, str(found["count"]), *(f"{found[key]:.2f}" for key in ("p50", "p99", "max")), goals)
    console.print(table)


if __name__ == "__main__":
    app = typer.Typer(add_completion=False, rich_markup_mode=None)
    app.command(epilog=_HELP_END)(main)
    app()
