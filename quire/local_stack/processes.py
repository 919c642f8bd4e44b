"""One service as a child process: start it, learn its address, watch it, stop it by its own pid.

The child's standard input is a pipe held only by this process; with `--stop-with-stdin` the child exits
when the pipe closes, so no child outlives this process, however it ends. Not here: which services there are
(quire.local_stack.stack).
"""

import os
import re
import signal
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO

from svc_common.errors import ConfigError, QuireError, Unavailable

KEPT_LINES = 30
_SERVICE_LINE = re.compile(r"^service (?P<name>\S+) pid=(?P<pid>\d+) address=(?P<address>\S+)(?P<others>(?: .*)?)$")
_PACKAGE_ROOT = Path(__file__).resolve().parents[2]
_CONFIG_ERROR_STATUS = 2

LineSink = Callable[[str, str], None]
"""Takes (service name, line of its standard error)."""


def ignore_line(name: str, line: str) -> None:
    """A LineSink that discards the line."""


def child_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """`environ`, with this package importable for `python -m quire` from any working directory."""
    extra = [str(_PACKAGE_ROOT)]
    if (_PACKAGE_ROOT / "kernels" / "paged_kernels").is_dir():
        extra.append(str(_PACKAGE_ROOT / "kernels"))
    before = environ.get("PYTHONPATH")
    return {**environ, "PYTHONPATH": os.pathsep.join([*extra, *([before] if before else [])])}


class ServiceProcess:
    """Owns one child process and the two threads that read its output.

    `address`, `metrics`: its listeners, as it printed them.
    """

    def __init__(self, name: str, arguments: Sequence[str], *, environ: Mapping[str, str], on_line: LineSink) -> None:
        self.name = name
        self.address = self.metrics = ""
        self._on_line = on_line
        self._announced = threading.Event()
        self._last_lines: deque[str] = deque(maxlen=KEPT_LINES)
        command = [sys.executable, "-m", "quire", "serve", *arguments, "--stop-with-stdin"]
        # Its own process group: Ctrl-C in a terminal reaches only the parent, which stops the services in
        # order.
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=child_environment(environ),
            process_group=0,
            text=True,
            errors="replace",
        )
        self._readers = [
            threading.Thread(target=self._read_stdout, name=f"{name}-stdout", daemon=True),
            threading.Thread(target=self._read_stderr, name=f"{name}-stderr", daemon=True),
        ]
        for reader in self._readers:
            reader.start()

    @property
    def pid(self) -> int:
        """Process id."""
        return self._process.pid

    @property
    def announced(self) -> bool:
        """True once the process has printed its `service` line, or has ended without it."""
        return self._announced.is_set()

    def check(self) -> None:
        """Raise the error of `death` if the process has ended."""
        death = self.death()
        if death is not None:
            raise death

    def death(self) -> QuireError | None:
        """Error that describes the process's exit; None while it runs.

        ConfigError for a wrong setting, otherwise Unavailable (metadata["summary"]: one line).
        """
        status = self._process.poll()
        if status is None:
            return None
        for reader in self._readers:
            reader.join(timeout=2)
        return self._death(status)

    def _death(self, status: int) -> QuireError:
        said = [line.removeprefix("error: ") for line in self._last_lines if line.startswith("error: ")]
        if status == _CONFIG_ERROR_STATUS and said:
            return ConfigError(said[-1], reason="SERVICE_CONFIG", metadata={"service": self.name})
        how = f"was killed by signal {-status}" if status < 0 else f"ended with status {status}"
        summary = ": ".join([f"the {self.name} (pid {self.pid}) {how}", *said[-1:]])
        tail = [] if said else list(self._last_lines)
        reason = f": {chr(10).join(tail)}" if tail else ""
        return Unavailable(summary + reason, reason="SERVICE_DIED", metadata={"service": self.name, "summary": summary})

    def terminate(self) -> None:
        """Send SIGTERM, and SIGCONT so that a process stopped by SIGSTOP handles it."""
        if self._process.poll() is None:
            self._process.terminate()
            self._process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        """Kill the process."""
        if self._process.poll() is None:
            self._process.kill()

    def wait(self, timeout_s: float) -> int:
        """Wait for the process to end and return its status; kill it after `timeout_s`."""
        try:
            status = self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self._on_line(self.name, f"did not stop within {timeout_s:.1f} s: killed")
            self._process.kill()
            status = self._process.wait()
        self._close()
        return status

    def _close(self) -> None:
        for reader in self._readers:
            reader.join(timeout=2)
        for pipe in (self._process.stdin, self._process.stdout, self._process.stderr):
            if pipe is not None:
                pipe.close()

    def _read_stdout(self) -> None:
        for line in self._lines(self._process.stdout):
            found = _SERVICE_LINE.match(line)
            if found:
                self.address = found["address"]
                self.metrics = dict(part.partition("=")[::2] for part in found["others"].split()).get("metrics", "")
                self._announced.set()
            else:
                self._on_line(self.name, line)
        self._announced.set()

    def _read_stderr(self) -> None:
        for line in self._lines(self._process.stderr):
            self._last_lines.append(line)
            self._on_line(self.name, line)

    @staticmethod
    def _lines(pipe: IO[str] | None) -> "Sequence[str] | map[str]":
        return map(lambda line: line.rstrip("\n"), pipe or ())
