"""Gateway, scheduler and a logging worker as three processes, and the figures of a run from the worker's log.

This module starts and stops them and computes the figures. The worker: benchmarks.overlap.worker.
"""

import asyncio
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

import numpy as np
from numpy.typing import NDArray

from benchmarks.overlap.worker import read_log
from benchmarks.simulated_stack import Arrivals, through_gateway
from quire.local_stack.processes import ServiceProcess, child_environment, ignore_line
from svc_common import health_probe

_START_S = 60.0
_SETTLING = 0.1
"""Share of the steps at both ends that does not count."""


@dataclass(frozen=True, slots=True)
class Run:
    """The steps of one run in which all sequences decoded. `steps`: int64 [n, 2], begin and end, ns; n at least 2."""

    steps: NDArray[np.int64]

    @property
    def step_ms(self) -> float:
        """Median length of a step at the worker."""
        return float(np.median(self.steps[:, 1] - self.steps[:, 0])) / 1e6

    @property
    def gap_us(self) -> float:
        """Median time between the end of a step and the begin of the next one."""
        return float(np.median(self._gaps)) / 1e3

    @property
    def share(self) -> float:
        """Sum of gaps / sum of the steps between them."""
        return float(self._gaps.sum() / (self.steps[:-1, 1] - self.steps[:-1, 0]).sum())

    @property
    def steps_per_s(self) -> float:
        """Steps per second from the first begin to the last."""
        return float((len(self.steps) - 1) / (self.steps[-1, 0] - self.steps[0, 0]) * 1e9)

    @property
    def _gaps(self) -> NDArray[np.int64]:
        return np.maximum(self.steps[1:, 0] - self.steps[:-1, 1], 0)


def steady(log: NDArray[np.int64], num_seqs: int) -> Run:
    """The longest run of steps with one token per sequence, less a tenth at both ends.

    Raises RuntimeError if there are too few.
    """
    full = np.flatnonzero(log[:, 2] == num_seqs)
    pieces = np.split(full, np.flatnonzero(np.diff(full) != 1) + 1)
    longest = max(pieces, key=len)
    cut = int(len(longest) * _SETTLING)
    kept = longest[cut : len(longest) - cut]
    if len(kept) < 2:
        raise RuntimeError("the sequences never all ran at the same time; use more steps")
    return Run(log[kept, :2])


class TimedStack:
    """Owner of the three processes. `worker`: options of `benchmarks.overlap.worker`; `log`: file of its steps."""

    def __init__(self, worker: Sequence[str], log: Path, *, overlap: bool) -> None:
        self._arguments = [str(log), *worker]
        self._log = log
        self._overlap = overlap
        self._num_read = 0
        self._exits = ExitStack()
        self._address = ""

    def __enter__(self) -> Self:
        with ExitStack() as started:
            worker = started.enter_context(_Worker(self._arguments))
            overlap = ["--overlap" if self._overlap else "--no-overlap"]
            ports = ("--port", "0", "--admin-port", "0", "--metrics-port", "0")
            scheduler = started_service(started, "scheduler", "--worker", worker.address, *ports, *overlap)
            doors = ("--port", "0", "--http-port", "0", "--admin-port", "0", "--admin-http-port", "0")
            gateway = started_service(started, "gateway", "--scheduler", scheduler.address, *doors)
            self._address = gateway.address
            until_serving(self._address)
            self._exits = started.pop_all()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._exits.close()

    def run(self, num_seqs: int, num_steps: int) -> Run:
        """Run `num_seqs` sequences at once through the gateway, of `num_steps` tokens each."""
        arrivals = Arrivals(num_seqs, num_steps)
        asyncio.run(through_gateway(self._address, arrivals))
        log = read_log(self._log, self._num_read)
        self._num_read += len(log)
        return steady(log, num_seqs)


class _Worker:
    """The worker's process; `address` is set once it listens."""

    def __init__(self, arguments: Sequence[str]) -> None:
        command = [sys.executable, "-m", "benchmarks.overlap.worker", *arguments]
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=child_environment(os.environ),
            process_group=0,
            text=True,
        )
        self.address = ""

    def __enter__(self) -> Self:
        line = self._process.stdout.readline() if self._process.stdout else ""
        if not line.startswith("service worker "):
            self.__exit__(None, None, None)
            raise RuntimeError(f"the worker ended with status {self._process.returncode} before it listened")
        self.address = line.strip().rpartition("address=")[2]
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._process.terminate()
        self._process.communicate(timeout=30)


def started_service(stack: ExitStack, name: str, *arguments: str) -> ServiceProcess:
    """Start `quire serve NAME ARGUMENTS`; it listens. It ends with `stack`."""
    process = ServiceProcess(name, [name, *arguments], environ=os.environ, on_line=ignore_line)
    stack.callback(process.wait, 10.0)
    stack.callback(process.terminate)
    deadline = time.monotonic() + _START_S
    while not process.announced and time.monotonic() < deadline:
        process.check()
        time.sleep(0.02)
    process.check()
    return process


def until_serving(address: str) -> None:
    """Wait until the service reports SERVING. Raises RuntimeError after a minute."""
    deadline = time.monotonic() + _START_S
    while (status := health_probe.probe(address)) != "SERVING":
        if time.monotonic() > deadline:
            raise RuntimeError(f"the stack did not become ready: {status}")
        time.sleep(0.05)
