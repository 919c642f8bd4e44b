"""Runs one service as `benchmarks.service` does and logs each call of a function of this repository's services.

    python -m benchmarks.call_path.trace scheduler '{"workers": ["127.0.0.1:50061"]}' LOG

This module holds the process and its log, which is written when the process ends. Each step of the worker is preceded by
a pause, in which no service has work: between two pauses lies the work for one step.
"""

import json
import os
import sys
import threading
import time
from array import array
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FrameType
from typing import Annotated, Any, Self

import typer

from benchmarks import service
from protos.worker.v1 import worker_pb2
from svc_common.clock import monotonic_ns
from worker_svc.engine import Engine, Pending

PAUSE_S = 0.06
_ROOT = Path(__file__).resolve().parents[2]
_PACKAGES = ("gateway_svc", "scheduler_svc", "worker_svc", "block_manager", "kernels", "svc_common")


class CallLog:
    """Times of all calls of product functions, and of the pauses. A coroutine that goes on counts as a call, as it costs one."""

    def __init__(self) -> None:
        self._indexes: dict[CodeType, int] = {}
        self._functions: list[str] = []
        self._times, self._calls = array("q"), array("i")
        self._pauses: list[int] = []

    @contextmanager
    def kept(self, path: Path) -> Iterator[None]:
        """Log the calls of this thread and of those that start within the context; written to `path` at its end."""
        threading.setprofile(self._on_event)
        sys.setprofile(self._on_event)
        try:
            yield
        finally:
            sys.setprofile(None)
            log = {"functions": self._functions, "times": list(self._times), "calls": list(self._calls)}
            path.write_text(json.dumps({**log, "pauses": self._pauses}), encoding="utf-8")

    def pause(self) -> None:
        """Wait until all services have done their work."""
        self._pauses.append(monotonic_ns())
        time.sleep(PAUSE_S)

    def _on_event(self, frame: FrameType, event: str, argument: Any) -> None:
        if event != "call":
            return
        index = self._indexes.get(frame.f_code)
        if index is None:
            index = self._indexes[frame.f_code] = self._new_index(frame.f_code)
        if index >= 0:
            self._times.append(time.monotonic_ns())
            self._calls.append(index)

    def _new_index(self, code: CodeType) -> int:
        """Index of a function; -1 for one of a library."""
        path = Path(code.co_filename)
        if not path.is_relative_to(_ROOT) or path.relative_to(_ROOT).parts[0] not in _PACKAGES:
            return -1
        self._functions.append(f"{path.relative_to(_ROOT)}:{code.co_qualname}")
        return len(self._functions) - 1


@dataclass(frozen=True, slots=True)
class LoggedCalls:
    """A log that was read: `functions` as PATH:NAME, `calls` as (ns, index into functions), `pauses` as ns when each began."""

    functions: list[str]
    calls: list[tuple[int, int]]
    pauses: list[int]

    @classmethod
    def read(cls, path: Path) -> Self:
        """Read the log of a process that has ended."""
        log = json.loads(path.read_text(encoding="utf-8"))
        return cls(log["functions"], list(zip(log["times"], log["calls"], strict=True)), log["pauses"])

    def between(self, begin_ns: int, end_ns: int) -> Counter[str]:
        """Number of calls by function."""
        return Counter(self.functions[index] for at, index in self.calls if begin_ns <= at < end_ns)

    def first(self, name: str, begin_ns: int) -> int:
        """Time of the first call of a function of that name from then on. Raises ValueError if there is none."""
        wanted = {i for i, function in enumerate(self.functions) if function.rpartition(".")[2] == name}
        found = next((at for at, index in self.calls if at >= begin_ns and index in wanted), None)
        if found is None:
            raise ValueError(f"no function {name} was called")
        return found


def _paced(engine: type[Engine], log: CallLog) -> None:
    """Pause before each step of all engines of that class."""
    launch = engine.launch

    def paced(self: Engine, outputs: worker_pb2.SchedulerOutputs) -> Pending:
        log.pause()
        return launch(self, outputs)

    engine.launch = paced  # type: ignore[method-assign]


def main(
    name: Annotated[str, typer.Argument(help="gateway, scheduler or worker.")],
    settings: Annotated[str, typer.Argument(help="Its settings, a JSON object.")],
    log: Annotated[Path, typer.Argument(help="Folder to write NAME.json to.")],
) -> None:
    """Runs one service of a benchmark and logs its calls."""
    calls = CallLog()
    if name == "worker":
        # Optional backend: the other services need no torch.
        from worker_svc.executor.model_engine import ModelEngine  # noqa: PLC0415

        _paced(ModelEngine, calls)
    with calls.kept(log / f"{name}.json"):
        service.main(name, settings)
    sys.stdout.flush()
    os._exit(0)  # nanobind would list objects that the traced functions kept


if __name__ == "__main__":
    typer.run(main)
