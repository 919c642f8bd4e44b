"""Measures the start of `quire up`: time to the first token, ready times and memory of each service.

    python -m benchmarks.startup --model models/tiny --runs 3
    python -m benchmarks.startup --phases                    # where the time goes: start_phases

Goals: first token within 5 s; gateway and scheduler listening within 1.5 s, at most 150 MB each. All times
count from the start of `quire up`, so they include its own start and those of the services side by side on
the same cores.
"""

import re
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import grpc
import psutil
import typer
from rich.console import Console
from rich.table import Table

from benchmarks import report, start_phases
from protos.inference.v1 import inference_pb2, inference_pb2_grpc

GOALS = {"first_token_s": 5.0, "gateway_listening_s": 1.5, "scheduler_listening_s": 1.5}
RSS_GOALS = {"gateway_rss_mb": 150.0, "scheduler_rss_mb": 150.0}
_SERVICE = re.compile(r"service (?P<name>\S+) pid=(?P<pid>\d+) address=(?P<address>\S+)")
_READY = re.compile(r"ready grpc=(?P<grpc>\S+)")
_TIMEOUT_S = 120.0


@dataclass(slots=True)
class Start:
    """One `quire up`, from its standard output. Times in seconds since the process was started; `pid`: its own."""

    pid: int = 0
    listening_s: dict[str, float] = field(default_factory=dict)
    pids: dict[str, int] = field(default_factory=dict)
    ready_s: float = 0.0
    address: str = ""

    def take(self, line: str, at_s: float) -> None:
        """Parse one line of standard output."""
        if found := _SERVICE.match(line):
            self.listening_s[found["name"]] = at_s
            self.pids[found["name"]] = int(found["pid"])
        elif found := _READY.match(line):
            self.ready_s, self.address = at_s, found["grpc"]


@contextmanager
def up(model: str, environ: dict[str, str] | None = None, cwd: Path | None = None) -> Iterator[tuple[Start, float]]:
    """`quire up` once it is ready, with its start time (`time.perf_counter`); stopped on exit."""
    ports = ("--grpc-port", "0", "--http-port", "0", "--admin-port", "0", "--admin-http-port", "0")
    command = [sys.executable, "-m", "quire", "up", "--model", model, *ports]
    started = time.perf_counter()
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=environ, cwd=cwd
    )
    watchdog = threading.Timer(_TIMEOUT_S, process.kill)
    watchdog.start()
    try:
        yield _watch(process, started), started
    finally:
        watchdog.cancel()
        process.terminate()
        process.wait(_TIMEOUT_S)
        if process.stdout is not None:
            process.stdout.close()


def run_once(model: str, environ: dict[str, str] | None = None) -> dict[str, float]:
    """Start, request one token, read memory, stop."""
    with up(model, environ) as (start, started):
        first_token(start.address)
        first_token_s = time.perf_counter() - started
        memory = {f"{name}_rss_mb": psutil.Process(pid).memory_info().rss / 1e6 for name, pid in start.pids.items()}
        pids = {"up": start.pid, **start.pids}
        peaks = {f"{name}_peak_mb": start_phases.peak_mb(pid) for name, pid in pids.items()}
        cpu = {f"{name}_cpu_s": _cpu_s(pid) for name, pid in pids.items()}
    listening = {f"{name}_listening_s": at_s for name, at_s in start.listening_s.items()}
    totals = {"peak_mb": sum(peaks.values()), "cpu_s": sum(cpu.values())}
    return {**listening, "ready_s": start.ready_s, "first_token_s": first_token_s, **memory, **peaks, **cpu, **totals}


def _cpu_s(pid: int) -> float:
    times = psutil.Process(pid).cpu_times()
    return float(times.user + times.system)


def _watch(process: subprocess.Popen[str], started: float) -> Start:
    start = Start(process.pid)
    for line in process.stdout or ():
        start.take(line, time.perf_counter() - started)
        if start.address:
            return start
    raise RuntimeError(f"`quire up` ended with status {process.wait()} before it was ready")


def first_token(address: str) -> None:
    """Return when a request has received a token."""
    request = inference_pb2.GenerateRequest(text="import ", stop=inference_pb2.StopConditions(max_tokens=8))
    with grpc.insecure_channel(address) as channel:
        for event in inference_pb2_grpc.InferenceServiceStub(channel).GenerateStream(request, timeout=60):
            if event.WhichOneof("event") == "delta":
                return
    raise RuntimeError("the stream ended without a token")


def main(
    model: Annotated[str, typer.Option(help="Checkpoint folder.")] = str(Path("models") / "tiny"),
    runs: Annotated[int, typer.Option(min=1)] = 3,
    phases: Annotated[bool, typer.Option("--phases", help="Show the worker's phases and all imports instead.")] = False,
    save: Annotated[bool, typer.Option(help="Write benchmarks/results/startup.json.")] = True,
) -> None:
    """Measures the start of `quire up`, several times."""
    if phases:
        start_phases.show(model, Console())
        return
    figures = [run_once(model) for _ in range(runs)]
    medians = {key: round(statistics.median(run[key] for run in figures), 3) for key in figures[0]}
    goals = {**GOALS, **RSS_GOALS}
    result: dict[str, Any] = {
        "benchmark": "startup",
        "model": model,
        "runs": figures,
        "median": medians,
        "goals": goals,
    }
    if save:
        report.save("startup", result)
    table = Table("figure", "median", "goal", "")
    for key, value in medians.items():
        goal = goals.get(key)
        verdict = "" if goal is None else ("met" if value <= goal else "missed")
        table.add_row(key, f"{value:,.2f}", "" if goal is None else f"{goal:g}", verdict)
    Console().print(table)


if __name__ == "__main__":
    typer.run(main)
