"""`quire up` as a person or a script runs it: started, read line by line, ended by its own pid."""

import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType

ROOT = Path(__file__).parents[3]
FREE_PORTS = ("--grpc-port", "0", "--http-port", "0", "--admin-port", "0", "--admin-http-port", "0")
SERVICE_LINE = re.compile(
    r"^service (gateway|scheduler|worker) pid=(\d+) address=(127\.0\.0\.1:\d+)(?: metrics=(127\.0\.0\.1:\d+))?$"
)
READY_LINE = re.compile(
    r"^ready grpc=(127\.0\.0\.1:\d+) http=(http://127\.0\.0\.1:\d+) admin=(127\.0\.0\.1:\d+) lab=(http://127\.0\.0\.1:\d+)$"
)
TIMEOUT_S = 240.0


def run_quire(*arguments: str, timeout_s: float = TIMEOUT_S, **options: object) -> subprocess.CompletedProcess[str]:
    """`quire ARGUMENTS` to its end; output as text."""
    command = [sys.executable, "-m", "quire", *arguments]
    return subprocess.run(  # type: ignore[call-overload]
        command, cwd=ROOT, capture_output=True, text=True, timeout=timeout_s, check=False, **options
    )


def is_running(pid: int) -> bool:
    """Whether the process exists and is no zombie."""
    return born(pid) is not None


def born(pid: int) -> str | None:
    """When that process was started, in ticks: tells it from later ones of its number. None: it does not run."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return None if fields[0] == "Z" else fields[19]


def wait_gone(pids: Sequence[int], timeout_s: float = 15.0) -> list[int]:
    """Those still running after `timeout_s`; returns at once when none is."""
    deadline = time.monotonic() + timeout_s
    while (left := [pid for pid in pids if is_running(pid)]) and time.monotonic() < deadline:
        time.sleep(0.05)
    return left


class UpProcess:
    """One `quire up`; context manager that never leaves anything behind, killed after `limit_s`."""

    def __init__(self, *arguments: str, environ: Mapping[str, str] | None = None, limit_s: float = TIMEOUT_S) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "quire", "up", *FREE_PORTS, *arguments],
            cwd=ROOT,
            env=environ,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.lines: list[str] = []
        self.errors: list[str] = []
        self._err_reader = threading.Thread(target=self._read_errors, daemon=True)
        self._err_reader.start()
        self._watchdog = threading.Timer(limit_s, self.process.kill)
        self._watchdog.start()

    def __enter__(self) -> "UpProcess":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._watchdog.cancel()
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        self._err_reader.join()
        for pipe in (self.process.stdout, self.process.stderr):
            if pipe is not None:
                pipe.close()
        wait_gone(list(self.pids.values()))

    def _read_errors(self) -> None:
        for line in self.process.stderr or ():
            self.errors.append(line)

    def wait_ready(self) -> tuple[str, str, str]:
        """(gRPC address, HTTP URL, admin address) once it says so."""
        for line in self.process.stdout or ():
            self.lines.append(line.rstrip("\n"))
            found = READY_LINE.match(self.lines[-1])
            if found:
                return found[1], found[2], found[3]
        raise AssertionError(f"ended without getting ready: {self.lines} {self.errors}")

    def read_lines(self, count: int) -> None:
        """So many more lines of standard output."""
        assert self.process.stdout is not None
        self.lines += [self.process.stdout.readline().rstrip("\n") for _ in range(count)]

    @property
    def addresses(self) -> dict[str, str]:
        """Addresses of the services, as printed."""
        return {found[1]: found[3] for line in self.lines if (found := SERVICE_LINE.match(line))}

    @property
    def pids(self) -> dict[str, int]:
        """Process ids of the services, as printed."""
        return {found[1]: int(found[2]) for line in self.lines if (found := SERVICE_LINE.match(line))}

    def stop(self, number: int = signal.SIGTERM) -> int:
        """Sends the signal and waits; the status."""
        self.process.send_signal(number)
        return self.process.wait(timeout=TIMEOUT_S)
