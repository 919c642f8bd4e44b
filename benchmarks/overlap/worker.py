"""A worker that logs the begin and end of each step: the real one, with two clock readings around each step.

    python -m benchmarks.overlap.worker LOG --model models/tiny
    python -m benchmarks.overlap.worker LOG --step-s 0.01          # the simulated one, steps of 10 ms

This module holds the process and its log format. It ends when its standard input closes.
"""

import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, BinaryIO

import numpy as np
import typer
from numpy.typing import NDArray

from protos.worker.v1 import worker_pb2
from quire.cli.serving import service
from quire_tools.simulated_worker.engine import SimulatedEngine
from quire_tools.simulated_worker.settings import SimulatedWorkerSettings
from svc_common.clock import monotonic_ns
from worker_svc.app import Watchers, serve_engine
from worker_svc.engine import Engine, Pending
from worker_svc.settings import ShellSettings, WorkerSettings

_RECORD = struct.Struct("<3q")
_CACHE_BYTES = 2**28


def read_log(path: Path, start: int) -> NDArray[np.int64]:
    """Steps from the `start`-th on: int64 [steps, 3]: begin, end (ns, monotonic), tokens computed."""
    data = path.read_bytes()[start * _RECORD.size :]
    return np.frombuffer(data[: len(data) // _RECORD.size * _RECORD.size], "<i8").reshape(-1, 3)


@dataclass(slots=True)
class _TimedStep:
    """A step that is written to `log` when it finishes."""

    pending: Pending
    began_ns: int
    log: BinaryIO

    @property
    def is_ready(self) -> bool:
        return self.pending.is_ready

    def wait(self) -> None:
        self.pending.wait()

    def finish(self) -> worker_pb2.WorkerOutputs:
        result = self.pending.finish()
        self.log.write(_RECORD.pack(self.began_ns, monotonic_ns(), result.num_computed_tokens))
        return result


def timed(engine: Engine, log: BinaryIO) -> Engine:
    """Make the engine write each step, from launch to finish, to `log`, which must be unbuffered."""
    launch = engine.launch

    def timed_launch(outputs: worker_pb2.SchedulerOutputs) -> Pending:
        began_ns = monotonic_ns()
        return _TimedStep(launch(outputs), began_ns, log)

    engine.launch = timed_launch  # type: ignore[method-assign]
    return engine


def main(
    log: Annotated[Path, typer.Argument(help="File to append to.")],
    model: Annotated[Path | None, typer.Option(help="Checkpoint folder; without it, the worker is simulated.")] = None,
    step_s: Annotated[float, typer.Option(help="Seconds per step of the simulated worker.")] = 0.0,
) -> None:
    """Starts the worker at any free port and prints its address as `quire serve worker` does."""
    with log.open("ab", buffering=0) as file:
        settings, make_engine = _real(model) if model is not None else _simulated(step_s)
        serving = serve_engine(
            settings,
            lambda: timed(make_engine(), file),
            on_ready=lambda address: service.announce("worker", address),
            watchers=Watchers(on_budget=lambda readable: None),
        )
        service.run(serving, stop_with_stdin=True)


def _simulated(step_s: float) -> tuple[ShellSettings, Callable[[], Engine]]:
    """Steps of the given length, whatever they contain."""
    settings = SimulatedWorkerSettings.of(
        port=0, step_base_s=step_s, prefill_token_s=0.0, decode_row_s=0.0, context_token_s=0.0
    )
    return settings, lambda: SimulatedEngine(settings)


def _real(model: Path) -> tuple[ShellSettings, Callable[[], Engine]]:
    # Optional backend: the simulated worker needs no torch.
    from worker_svc.executor.model_engine import ModelEngine  # noqa: PLC0415

    settings = WorkerSettings.of(port=0, model=model, kv_cache_memory_bytes=_CACHE_BYTES)
    return settings, lambda: ModelEngine(settings)


if __name__ == "__main__":
    typer.run(main)
