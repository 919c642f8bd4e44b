"""The processes of an engine: started, found, frozen, measured, and ended by their own ids."""

import contextlib
import os
import socket
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import IO, Self

import psutil

from benchmarks.compare.engines.base import Memory

_STOP_S = 30.0
_TAIL = 2_000


class Child:
    """Owner of one child process and its descendants.

    Its standard error goes to `log`, and so does its standard output unless it `answers`.
    """

    def __init__(self, command: Sequence[str], environ: Mapping[str, str], log: Path, *, answers: bool) -> None:
        log.parent.mkdir(parents=True, exist_ok=True)
        self._log = log
        with log.open("wb") as said:
            # A process group of its own: Ctrl-C in a terminal reaches only the benchmark, which ends the
            # child in order.
            self.process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE if answers else said,
                stderr=said,
                env=dict(environ),
                process_group=0,
                text=True,
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.end()

    @property
    def stdin(self) -> IO[str]:
        """Its standard input."""
        assert self.process.stdin is not None
        return self.process.stdin

    @property
    def stdout(self) -> IO[str]:
        """Its standard output."""
        assert self.process.stdout is not None
        return self.process.stdout

    def check(self) -> None:
        """Raise RuntimeError with the end of its log if it has ended."""
        status = self.process.poll()
        if status is not None:
            raise RuntimeError(f"ended with status {status}: {self.last_words()}")

    def last_words(self) -> str:
        """The end of its log."""
        return self._log.read_text(encoding="utf-8", errors="replace")[-_TAIL:].strip()

    def all(self) -> list[psutil.Process]:
        """The process and its living descendants."""
        try:
            root = psutil.Process(self.process.pid)
            return [root, *root.children(recursive=True)]
        except psutil.NoSuchProcess:
            return []

    def suspend(self) -> None:
        """Freeze all of them."""
        for process in self._living():
            process.suspend()

    def resume(self) -> None:
        """Unfreeze all of them."""
        for process in self._living():
            process.resume()

    def _living(self) -> Iterator[psutil.Process]:
        for process in self.all():
            with contextlib.suppress(psutil.NoSuchProcess):
                yield process

    def end(self) -> None:
        """Ask it to end, and kill what is left after a while."""
        processes = self.all()
        self.resume()
        self.process.terminate()
        _, alive = psutil.wait_procs(processes, timeout=_STOP_S)
        for process in alive:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        self.process.wait(_STOP_S)
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                with contextlib.suppress(BrokenPipeError):
                    pipe.close()

    def memory(self) -> Memory:
        """See Memory. Read once, so that nothing is sampled during a run."""
        processes = self.all()
        return Memory(sum(map(_peak_mb, processes)), sum(map(_now_mb, processes)))

    def cpu_s(self) -> float:
        """Processor time of all living processes."""
        return sum(map(_cpu_s, self.all()))


def _peak_mb(process: psutil.Process) -> float:
    try:
        lines = Path(f"/proc/{process.pid}/status").read_text(encoding="utf-8").splitlines()
    except OSError:
        return 0.0
    return next((int(line.split()[1]) / 1e3 for line in lines if line.startswith("VmHWM:")), 0.0) * 1.024


def _now_mb(process: psutil.Process) -> float:
    try:
        full = process.memory_full_info()
    except psutil.Error:
        return 0.0
    return float(getattr(full, "pss", full.rss)) / 1e6


def _cpu_s(process: psutil.Process) -> float:
    try:
        times = process.cpu_times()
    except psutil.Error:
        return 0.0
    return float(times.user + times.system)


def free_port() -> int:
    """A port that is currently free."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def plain_environment() -> dict[str, str]:
    """This process's environment without variables that would lead another Python to this one's packages."""
    return {
        name: value for name, value in os.environ.items() if name not in {"PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV"}
    }


class OneChild:
    """The part of an `Engine` that runs in one child process, `_child`; None while it is stopped."""

    def __init__(self) -> None:
        self._child: Child | None = None

    def pause(self) -> None:
        """Freeze it, so that it cannot spin either."""
        if self._child is not None:
            self._child.suspend()

    def resume(self) -> None:
        """See Engine.resume."""
        if self._child is not None:
            self._child.resume()

    def memory(self) -> Memory:
        """See Engine.memory."""
        return Memory(0.0, 0.0) if self._child is None else self._child.memory()

    def cpu_s(self) -> float:
        """See Engine.cpu_s."""
        return 0.0 if self._child is None else self._child.cpu_s()

    def stop(self) -> None:
        """See Engine.stop."""
        if self._child is not None:
            self._child.end()
            self._child = None
