"""Memory reports over the time of a recording."""

from dataclasses import dataclass

from block_manager.memory_report import MemoryReport
from quire_tools.replay.quiet_watcher import QuietWatcher
from scheduler_svc.core.plan import StepPlan
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.observe.memory_view import memory_report


@dataclass(frozen=True, slots=True)
class MemoryPoint:
    """Device memory right after planning a step; `num_free` of `num_blocks` are free."""

    step: int
    at_s: float
    num_blocks: int
    num_free: int
    report: MemoryReport


class MemoryCourse(QuietWatcher):
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
