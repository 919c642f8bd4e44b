"""Memory reports over the time of a recording."""

from dataclasses import dataclass

from block_manager.memory_report import MemoryReport
from scheduler_svc.core.plan import EndedSequence, StepOutcome, StepPlan
from scheduler_svc.core.request import Request
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.observe.memory_view import memory_report
from scheduler_svc.observe.recording.events import AbortEvent, Failed, Returned, StoppedAt


@dataclass(frozen=True, slots=True)
class MemoryPoint:
    """Device memory right after planning a step; `num_free` of `num_blocks` are free."""

    step: int
    at_s: float
    num_blocks: int
    num_free: int
    report: MemoryReport


class MemoryCourse:
    """A `Watcher` that takes a memory report every `every` steps."""

    def __init__(self, every: int) -> None:
        self.points: list[MemoryPoint] = []
        self._every = max(1, every)
        self._core: Scheduler | None = None
        self._first_step = 0

    def began(self, core: Scheduler) -> None:
        """See `Watcher`."""
        self._core = core
        self._first_step = core.step + 1

    def planned(self, plan: StepPlan, at: float) -> None:
        """See `Watcher`."""
        if self._core is not None and (plan.step - self._first_step) % self._every == 0:
            gpu = self._core.pool_report().gpu
            self.points.append(MemoryPoint(plan.step, at, gpu.total, gpu.free, memory_report(self._core.state)))

    def arrived(self, request: Request, at: float) -> None:
        """See `Watcher`."""

    def returned(self, event: Returned | Failed, outcome: StepOutcome) -> None:
        """See `Watcher`."""

    def ended(self, event: AbortEvent | StoppedAt, ended: list[EndedSequence]) -> None:
        """See `Watcher`."""

    def lost_worker(self, lane: int | None) -> None:
        """See `Watcher`."""
