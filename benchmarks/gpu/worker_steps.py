"""Steps of a worker's engine, as its scheduler would send them: prompts and decode steps of whole models, sampling included.

Each decode step is launched before the results of the one before are read. The floor of a step is the time to read its
weights and its cache, or to compute its products, whichever is longer.
"""

import gc
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu.clock import Bench
from benchmarks.gpu.models import Shape
from protos.worker.v1 import worker_pb2
from svc_common.errors import QuireError
from tests.support.worker.builders import Row, step
from worker_svc.device.devices import Devices
from worker_svc.engine import Pending
from worker_svc.executor.model_engine import ModelEngine
from worker_svc.settings import WorkerSettings

BLOCK_SIZE = 16
_WARM_STEPS = 5
_PROMPTS = 5


@dataclass(frozen=True, slots=True)
class Batch:
    """Sequences that decode at this context, and the share of the floor to reach."""

    sequences: int
    context: int
    goal: float | None = None

    @property
    def name(self) -> str:
        """As in the table."""
        return f"b{self.sequences} x {self.context}"


class WorkerSteps:
    """A worker's engine with one checkpoint, as `quire serve worker` has it with `settings`."""

    def __init__(
        self, bench: Bench, devices: Devices, shape: Shape, folder: Path, batches: Sequence[Batch], **settings: Any
    ) -> None:
        self._bench, self._shape, self._settings = bench, shape, settings
        self._num_steps = 4 if bench.tiny else 100
        longest = max(batch.context for batch in batches) + self._num_steps + _WARM_STEPS + 2
        most = max(batch.sequences for batch in batches)
        gc.collect()  # the memory of the engine before
        given = WorkerSettings.of(
            model=folder, device="cuda", block_size=BLOCK_SIZE, max_model_len=longest, swap_space_gib=0, **settings
        )
        self._engine = ModelEngine(given, devices)
        self._engine.load(lambda _stage, _fraction: None)
        found = self._engine.profile(max(batch.context for batch in batches), most)
        self._room = -(-longest // BLOCK_SIZE)
        self._fits = found.num_gpu_blocks // self._room
        self._engine.allocate(min(found.num_gpu_blocks, most * self._room), 0)
        self._steps = 0

    # --- decode steps ------------------------------------------------------------------------------------------------

    def decode(self, name: str, batch: Batch) -> None:
        """Measure decode steps of a batch, and how long the device waits between two of them."""
        label = f"{self._shape.name} {batch.name}"
        if batch.sequences > self._fits:
            self._bench.skipped.append(f"{name} {label}: its cache does not fit")
            return
        self._bench.measure(
            name, label, lambda: self._decoded(batch, label), work=self.floor_s(batch), ceiling="floor", goal=batch.goal
        )

    def floor_s(self, batch: Batch) -> float:
        """Least time of a step."""
        shape, bench = self._shape, self._bench
        operations = 2 * shape.num_parameters * batch.sequences
        dtype_bytes = 1 if self._settings.get("kv_cache_dtype") == "fp8" else 2
        cache_bytes = batch.sequences * batch.context * shape.kv_bytes(dtype_bytes)
        return bench.floor_s(shape.weight_bytes, operations) + bench.floor_s(cache_bytes, 0)

    def _decoded(self, batch: Batch, label: str) -> float:
        self._engine.reset()
        tokens = [7] * batch.context
        rows = [
            Row(i, tokens, range(i * self._room, (i + 1) * self._room), 1, num_computed=batch.context - 1)
            for i in range(batch.sequences)
        ]
        self._launch(step(self._next(), add=rows)).finish()
        self._run(_WARM_STEPS)
        marks = _Marks(self._bench.device)
        begin = time.perf_counter()
        self._run(self._num_steps, marks)
        seconds = (time.perf_counter() - begin) / self._num_steps
        gap = marks.gap_s()
        if gap is not None:
            self._bench.record("gap between steps", label, gap, work=seconds, ceiling="floor")
        return seconds

    def _run(self, count: int, marks: "_Marks | None" = None) -> None:
        pending: Pending | None = None
        for _ in range(count):
            if marks is not None:
                marks.begin()
            launched = self._launch(step(self._next()))
            if marks is not None:
                marks.end()
            if pending is not None:
                _check(pending.finish())
            pending = launched
        assert pending is not None
        _check(pending.finish())

    # --- prompts -----------------------------------------------------------------------------------------------------

    def prompt(self, name: str, num_tokens: int, goal: float | None = None) -> None:
        """Measure the time from a prompt's launch to its first token, on an idle worker."""
        shape = self._shape
        operations = 2 * shape.num_parameters * num_tokens + shape.attention_operations(num_tokens)
        floor_s = self._bench.floor_s(shape.weight_bytes, operations)
        label = f"{shape.name} {num_tokens} tokens"
        self._bench.measure(
            name, label, lambda: self._first_token(num_tokens), work=floor_s, ceiling="floor", goal=goal
        )

    def _first_token(self, num_tokens: int) -> float:
        self._engine.reset()
        blocks, times = range(-(-num_tokens // BLOCK_SIZE) + 1), []
        for incarnation in range(1, (1 if self._bench.tiny else _PROMPTS) + 2):
            row = Row(0, [11] * num_tokens, blocks, num_tokens, incarnation=incarnation)
            begin = time.perf_counter()
            _check(self._launch(step(self._next(), add=[row])).finish())
            times.append(time.perf_counter() - begin)
            self._launch(step(self._next(), remove=[0])).finish()
        return statistics.median(times[1:])

    def _launch(self, message: worker_pb2.SchedulerOutputs) -> Pending:
        return self._engine.launch(message)

    def _next(self) -> int:
        self._steps += 1
        return self._steps


class _Marks:
    """Events around the work of each step on the device."""

    def __init__(self, device: torch.device) -> None:
        self._is_real = device.type == "cuda" and torch.cuda.is_available()
        self._begins: list[torch.cuda.Event] = []
        self._ends: list[torch.cuda.Event] = []

    def begin(self) -> None:
        """Before a step is launched."""
        self._mark(self._begins)

    def end(self) -> None:
        """Behind it."""
        self._mark(self._ends)

    def _mark(self, events: list[torch.cuda.Event]) -> None:
        if self._is_real:
            events.append(torch.cuda.Event(enable_timing=True))
            events[-1].record()

    def gap_s(self) -> float | None:
        """Mean time that the device waits for the next step; None where there are no events."""
        if not self._is_real:
            return None
        torch.cuda.synchronize()
        gaps = [end.elapsed_time(begin) for end, begin in zip(self._ends, self._begins[1:], strict=False)]
        return max(statistics.mean(gaps) / 1e3, 1e-9)


def _check(outputs: worker_pb2.WorkerOutputs) -> None:
    if outputs.HasField("error"):
        raise RuntimeError(outputs.error.message)


# --- what is measured ------------------------------------------------------------------------------------------------

Make = Callable[..., WorkerSteps]
_GOALS = {1: 0.85, 32: 0.85, 128: 0.85, 256: 0.83}


def _batches(*sizes: int, tiny: bool) -> list[Batch]:
    return [Batch(2, 20)] if tiny else [Batch(size, 1024, _GOALS.get(size)) for size in sizes]


def large(bench: Bench, devices: Devices, shape: Shape, folder: Path) -> None:
    """E1, E2, E6: decode steps and a prompt of the 8 B model."""
    batches = _batches(1, 32, 128, 256, tiny=bench.tiny)
    worker = WorkerSteps(bench, devices, shape, folder, batches)
    for batch in batches:
        worker.decode("decode step", batch)
    worker.prompt("first token", 20 if bench.tiny else 1024, 0.82)


def large_fp8(bench: Bench, devices: Devices, shape: Shape, folder: Path) -> None:
    """E12: FP8 weights, then an FP8 cache too."""
    batches = _batches(128, tiny=bench.tiny)
    for name, cache in (("fp8 weights, decode step", "auto"), ("fp8 weights and cache, decode step", "fp8")):
        WorkerSteps(bench, devices, shape, folder, batches, kv_cache_dtype=cache).decode(name, batches[0])


def small(bench: Bench, devices: Devices, shape: Shape, folder: Path, libraries: Sequence[str] = ()) -> None:
    """E5, E10: the 0.6 B model as a program and by its modules, with an FP8 cache, and with attention of each library."""
    batches = _batches(1, 32, tiny=bench.tiny)
    variants: list[tuple[str, dict[str, Any]]] = [
        ("decode step", {}),
        ("modules, decode step", {"fuse": False}),
        ("fp8 cache, decode step", {"kv_cache_dtype": "fp8"}),
        *((f"{name}, decode step", {"attention_backend": name}) for name in libraries),
    ]
    for name, settings in variants:
        try:
            worker = WorkerSteps(bench, devices, shape, folder, batches, **settings)
        except (QuireError, RuntimeError) as error:
            bench.skip(f"{name} {shape.name}", error)
            continue
        for batch in batches:
            worker.decode(name, batch)
        worker.prompt(name.replace("decode step", "first token"), 20 if bench.tiny else 1024)
        del worker
