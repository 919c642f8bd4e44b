"""`quire up` of an installation, from its first line to its last."""

import signal
import subprocess
import threading
from types import TracebackType
from typing import Self

from tests.install.environment import Environment
from tests.support.commands import Failure
from tests.support.stack.up_process import FREE_PORTS, READY_LINE

_START_S, _STOP_S = 300.0, 60.0


class Served:
    """Owns one `quire up`, which serves the built-in model once entered. Context manager."""

    def __init__(self, environment: Environment, *arguments: str) -> None:
        self.errors: list[str] = []
        self.grpc = self.http = ""
        self._process = subprocess.Popen(
            [environment.bin / "quire", "up", *FREE_PORTS, *arguments],
            cwd=environment.empty,
            env=environment.environ,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self._reader = threading.Thread(target=self._read_errors, daemon=True)
        self._watchdog = threading.Timer(_START_S, self._process.kill)

    def __enter__(self) -> Self:
        self._reader.start()
        self._watchdog.start()
        for line in self._process.stdout or ():
            if found := READY_LINE.match(line.strip()):
                self.grpc, self.http = found[1], found[2]
                self._watchdog.cancel()
                return self
        self._end()
        raise Failure(f"`quire up` ended without getting ready: {''.join(self.errors)[-600:]}")

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        status = self._end()
        if kind is None and status != 0:
            raise Failure(f"`quire up` ended with {status} after SIGTERM: {''.join(self.errors)[-600:]}")

    def _end(self) -> int:
        self._watchdog.cancel()
        self._process.send_signal(signal.SIGTERM)
        try:
            status = self._process.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            status = self._process.wait()
        self._reader.join()
        return status

    def _read_errors(self) -> None:
        self.errors.extend(self._process.stderr or ())
