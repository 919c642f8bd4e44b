"""Times work on a device and measures the device's ceilings to compare with.

Every figure is a share of a ceiling measured in the same run: copying memory (read + write), a bfloat16
matrix product, copies to and from pinned memory. The other modules of this folder define what is timed.
"""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from svc_common.errors import QuireError

_LEAST_S = 0.03
_MOST_REPEATS = 50
_MEMORY, _GEMM, _TO_HOST, _TO_DEVICE = "memory", "gemm", "to host", "to device"


@dataclass(frozen=True, slots=True)
class Figure:
    """One measurement.

    `work`: bytes or floating-point operations, of the kind that `ceiling` limits. `anchor`: a published
    figure for other hardware or programs, for orientation. `goal`: share to reach, None = none.
    """

    name: str
    shape: str
    seconds: float
    work: float
    ceiling: str
    anchor: str = ""
    goal: float | None = None

    @property
    def rate(self) -> float:
        """Work per second."""
        return self.work / self.seconds


@dataclass(slots=True)
class Bench:
    """One run on one device: its clock, time limit and results.

    `tiny`: a rehearsal with small shapes, and figures without a meaning. `on_figure` is called behind each.
    """

    device: torch.device
    deadline_s: float
    tiny: bool
    ceilings: dict[str, list[float]] = field(default_factory=dict)
    figures: list[Figure] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)
    on_figure: Callable[["Bench"], None] = lambda bench: None

    def add(
        self, name: str, shape: str, make: Callable[[], Callable[[], Any]], *, graph: bool = True, **what: Any
    ) -> None:
        """Time what `make` prepares, unless time is up.

        `what`: the other fields of Figure; `calls`: repetitions per run.
        """
        calls = what.pop("calls", 1)
        self.measure(name, shape, lambda: self.seconds(make(), graph=graph) / calls, **what)

    def measure(self, name: str, shape: str, seconds: Callable[[], float], **what: Any) -> None:
        """Record the time that `seconds` measures, unless time is up or it fails."""
        if time.monotonic() > self.deadline_s:
            self.skipped.append(f"{name} {shape}: out of time")
            return
        try:
            self.record(name, shape, seconds(), **what)
        except torch.cuda.OutOfMemoryError:
            self.skipped.append(f"{name} {shape}: out of memory")
        except (RuntimeError, QuireError) as error:
            self.skip(f"{name} {shape}", error)
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

    def skip(self, what: str, error: Exception) -> None:
        """Note why `what` has no figure."""
        self.skipped.append(f"{what}: {str(error).strip().partition(chr(10))[0][:160]}")

    def record(self, name: str, shape: str, seconds: float, **what: Any) -> None:
        """Add a figure. `what`: the other fields of Figure."""
        self.figures.append(Figure(name, shape, seconds, **what))
        self.on_figure(self)

    def share(self, figure: Figure) -> float:
        """Share of its ceiling that a figure reaches; a ceiling is the better of its first and last measurement."""
        return figure.rate / max(self.ceilings[figure.ceiling])

    # --- time --------------------------------------------------------------------------------------------------------

    def seconds(self, run: Callable[[], Any], *, graph: bool) -> float:
        """Median time of `run`. `graph`: replayed from a CUDA graph, so that it includes no Python time."""
        if not torch.cuda.is_available():
            begin = time.perf_counter()
            run()
            return time.perf_counter() - begin
        for _ in range(3):
            run()
        torch.cuda.synchronize()
        once = _captured(run) if graph else run
        found = [_timed(once)]
        while sum(found) < _LEAST_S and len(found) < _MOST_REPEATS:
            found.append(_timed(once))
        return statistics.median(found[1:] or found)

    # --- ceilings ----------------------------------------------------------------------------------------------------

    def measure_ceilings(self) -> None:
        """Measure the ceilings. Called once before and once after the rest: the spread shows how steady the machine was."""
        num_bytes, side = (1 << 12, 32) if self.tiny else (1 << 30, 8192)
        source = torch.ones(num_bytes, dtype=torch.uint8, device=self.device)
        target = torch.empty_like(source)
        pinned = torch.empty(max(num_bytes // 4, 1), dtype=torch.uint8, pin_memory=torch.cuda.is_available())
        part = source[: len(pinned)]
        left, right = (torch.randn(side, side, device=self.device).bfloat16() for _ in range(2))
        self._ceiling(_MEMORY, lambda: target.copy_(source), 2 * num_bytes)
        self._ceiling(_GEMM, lambda: left @ right, 2 * side**3)
        self._ceiling(_TO_HOST, lambda: pinned.copy_(part, non_blocking=True), len(pinned))
        self._ceiling(_TO_DEVICE, lambda: part.copy_(pinned, non_blocking=True), len(pinned))

    def _ceiling(self, name: str, run: Callable[[], Any], work: float) -> None:
        self.ceilings.setdefault(name, []).append(work / self.seconds(run, graph=False))

    def floor_s(self, num_bytes: float, operations: float) -> float:
        """Minimum time for this memory traffic and arithmetic at the ceilings' rates."""
        return max(num_bytes / max(self.ceilings[_MEMORY]), operations / max(self.ceilings[_GEMM]))


def _captured(run: Callable[[], Any]) -> Callable[[], None]:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph.replay


def _timed(run: Callable[[], Any]) -> float:
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    run()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) / 1e3
