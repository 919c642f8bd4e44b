"""One scheduler process with many simulated workers, all of them full: its CPU time per step, and how regular steps are.

    python -m benchmarks.group_load                              # 1 and 64 workers with 256 running sequences each
    python -m benchmarks.group_load --workers 1,8 --json         # one JSON object

Three processes: all workers, the scheduler, and this one, which attaches as a gateway and reads tokens. A *gap* is the time from
the end of a worker's step to the begin of its next one. Goals: at most 150 us per step, p99 of the time from step to step within
20 % of that of one worker. Steps take `--step-s`, long enough that two cores compute all that is around them.
"""

import asyncio
import json
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import AsyncIterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import psutil
import typer
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table

from benchmarks import report
from benchmarks.command_line import numbers
from benchmarks.overlap.stack import started_service
from benchmarks.overlap.worker import read_log
from benchmarks.simulated_stack import submit
from protos.engine.v1 import engine_pb2, engine_pb2_grpc
from svc_common import wire_arrays
from svc_common.net import rpc

_GOAL_US, _GOAL_SPREAD = 150.0, 1.2
_MOST_TOKENS = 2000
_START_S = 120.0


class Load:
    """Requests of one gateway to a scheduler: `count` at once, which do not end before `num_tokens` tokens."""

    def __init__(self, count: int, num_tokens: int) -> None:
        self._count, self._num_tokens = count, num_tokens
        self._closed = asyncio.Event()
        self.counts: NDArray[np.int64] = np.zeros(count + 1, np.int64)

    async def run(self, address: str) -> None:
        """Submit, and count tokens until `close`. Raises RuntimeError if a request fails."""
        async with rpc.channel(address) as channel:
            call = engine_pb2_grpc.EngineServiceStub(channel).Attach(self._messages())
            async for message in call:
                if message.failed:
                    raise RuntimeError(f"{message.failed[0].error.reason}: {message.failed[0].error.message}")
                handles = wire_arrays.unpack(message.tokens.handles, "handles", wire_arrays.U32)
                self.counts[handles] += wire_arrays.unpack(message.tokens.counts, "counts", wire_arrays.U32)
                if self._closed.is_set():
                    call.cancel()
                    return

    def close(self) -> None:
        """End `run` with the next message."""
        self._closed.set()

    async def _messages(self) -> AsyncIterator[engine_pb2.FrontendMessage]:
        hello = engine_pb2.FrontendHello(identity=rpc.Identity().message(), frontend_id=uuid.uuid4().hex)
        yield engine_pb2.FrontendMessage(hello=hello)
        for begin in range(0, self._count, 1024):
            indexes = range(begin, min(begin + 1024, self._count))
            yield engine_pb2.FrontendMessage(submits=[submit(i, self._num_tokens) for i in indexes])
            await asyncio.sleep(0.05)
        await self._closed.wait()


def measure(
    num_workers: int, sequences: int, step_s: float, seconds: float, policy: str, *, recording: bool
) -> dict[str, Any]:
    """One run, measured for `seconds` once all sequences run."""
    with ExitStack() as started, tempfile.TemporaryDirectory() as folder:
        addresses = _workers(started, Path(folder), num_workers, step_s)
        scheduler = started_service(
            started, "scheduler", *(part for address in addresses for part in ("--worker", address)),
            *("--port", "0", "--admin-port", "0", "--metrics-port", "0", "--policy", policy),
            *("--record-memory", "16MiB" if recording else "0", "--max-num-seqs", str(sequences)),
            *("--max-waiting-requests", str(num_workers * sequences + 1)),
        )  # fmt: skip
        process = psutil.Process(scheduler.pid)
        load = Load(num_workers * sequences, _MOST_TOKENS)
        begin_ns, end_ns, cpu_s = asyncio.run(_window(load, scheduler.address, process, seconds))
        logs = [read_log(Path(folder) / f"{i}.log", 0) for i in range(num_workers)]
    return _figures(num_workers, sequences, [_within(log, begin_ns, end_ns) for log in logs], cpu_s)


def _workers(started: ExitStack, folder: Path, count: int, step_s: float) -> list[str]:
    command = [sys.executable, "-m", "benchmarks.group_load.workers", str(folder), "--count", str(count)]
    process = subprocess.Popen(
        [*command, "--step-s", str(step_s)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    started.callback(process.communicate, timeout=60)
    assert process.stdout is not None
    lines = [process.stdout.readline() for _ in range(count)]
    if not all(line.startswith("service worker ") for line in lines):
        raise RuntimeError("the workers ended before all of them listened")
    return [line.strip().rpartition("address=")[2] for line in lines]


async def _window(load: Load, address: str, process: psutil.Process, seconds: float) -> tuple[int, int, float]:
    """Begin, end and the scheduler's CPU time of the window."""
    running = asyncio.create_task(load.run(address))
    deadline_s = time.monotonic() + _START_S
    while not (load.counts[1:] > 1).all():
        await asyncio.sleep(0.2)
        if running.done():
            running.result()
        if time.monotonic() > deadline_s:
            raise RuntimeError(
                f"{int((load.counts[1:] > 1).sum())} of {len(load.counts) - 1} sequences run after {_START_S:.0f} s"
            )
    await asyncio.sleep(1.0)
    begin_ns, before = time.monotonic_ns(), process.cpu_times()
    await asyncio.sleep(seconds)
    end_ns, after = time.monotonic_ns(), process.cpu_times()
    load.close()
    await running
    return begin_ns, end_ns, after.user + after.system - before.user - before.system


def _within(log: NDArray[np.int64], begin_ns: int, end_ns: int) -> NDArray[np.int64]:
    return log[(log[:, 0] >= begin_ns) & (log[:, 1] <= end_ns)]


def _figures(num_workers: int, sequences: int, logs: Sequence[NDArray[np.int64]], cpu_s: float) -> dict[str, Any]:
    assert all((log[:, 2] == sequences).all() for log in logs), "a step that is not one token of each sequence"
    gaps = np.concatenate([(log[1:, 0] - log[:-1, 1]) / 1e3 for log in logs])
    periods = np.concatenate([np.diff(log[:, 0]) / 1e3 for log in logs])
    num_steps = sum(map(len, logs))
    return {
        "workers": num_workers,
        "sequences": sequences,
        "steps": num_steps,
        "cpu_us_per_step": round(cpu_s / num_steps * 1e6, 1),
        "gap_us": report.spread(gaps.tolist(), 0),
        "period_us": report.spread(periods.tolist(), 0),
    }


def main(
    workers: Annotated[str, typer.Option(help="Numbers of workers.")] = "1,64",
    sequences: Annotated[int, typer.Option(min=1, help="Running sequences of each.")] = 256,
    step_s: Annotated[float, typer.Option(min=0, help="Seconds of a worker's step.")] = 0.25,
    seconds: Annotated[float, typer.Option(min=1, help="How long to measure.")] = 20.0,
    policy: Annotated[str, typer.Option(help="Preset of the scheduler.")] = "quire",
    recording: Annotated[bool, typer.Option(help="Keep the recording for `quire record`.")] = True,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object on standard output, nothing else.")] = False,
    save: Annotated[bool, typer.Option("--save", help="Write benchmarks/results/group_load.json.")] = False,
) -> None:
    """Measures a scheduler with full workers."""
    counts = numbers(workers, 1, 256, "1,64")
    rows = [measure(count, sequences, step_s, seconds, policy, recording=recording) for count in counts]
    result = {"benchmark": "group_load", "policy": policy, "step_s": step_s, "recording": recording, "runs": rows}
    if save:
        report.save("group_load", result)
    if as_json:
        print(json.dumps({**report.provenance(), **result}, indent=2))
    else:
        _show(rows, Console())


def _show(rows: Sequence[dict[str, Any]], console: Console) -> None:
    table = Table(
        "workers", "sequences", "steps", "CPU us / step", "gap us, p50", "p99", "step to step us, p50", "p99", "/ first"
    )
    for row in rows:
        spread = row["period_us"]["p99"] / rows[0]["period_us"]["p99"]
        figures = [row["gap_us"]["p50"], row["gap_us"]["p99"], row["period_us"]["p50"], row["period_us"]["p99"]]
        marked = [f"{row['cpu_us_per_step']:.0f}", *(f"{figure:,.0f}" for figure in figures), f"{spread:.2f}"]
        table.add_row(str(row["workers"]), str(row["sequences"]), str(row["steps"]), *marked)
    console.print(table)
    console.print(
        f"goals: at most {_GOAL_US:.0f} us a step; p99 at most {_GOAL_SPREAD} times that of one worker", markup=False
    )


if __name__ == "__main__":
    typer.run(main)
