"""Memory reports over the time of a recording."""

from collections.abc import Callable
from dataclasses import dataclass

from block_manager.memory_report import MemoryReport
from scheduler_svc.core.plan import StepPlan
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.observe.memory_view import memory_report
from scheduler_svc.observe.run_observer import RunObserver
from scheduler_svc.observe.step_record import StepOrigin
from svc_common.clock import NS_PER_S


@dataclass(frozen=True, slots=True)
class MemoryPoint:
    """Device memory right after planning a step; `num_free` of `num_blocks` are free."""

    step: int
    at_s: float
    num_blocks: int
    num_free: int
    report: MemoryReport


class MemoryCourse(RunObserver):
    """Takes a memory report every `every` steps."""

    def __init__(self, every: int) -> None:
        self.points: list[MemoryPoint] = []
        self._every = max(1, every)
        self._core: Scheduler | None = None
        self._first_step = 0

    def on_start(self, core: Scheduler, clock: Callable[[], float]) -> None:
        """Count steps from here, and read this core from now on."""
        self._core = core
        self._first_step = core.step + 1

    def on_plan(self, plan: StepPlan, origin: StepOrigin) -> None:
        """Take a report if it is the step's turn."""
        if self._core is not None and (plan.step - self._first_step) % self._every == 0:
            gpu = self._core.pool_report().gpu
            at_s, report = origin.planned_ns / NS_PER_S, memory_report(self._core.states)
            self.points.append(MemoryPoint(plan.step, at_s, gpu.total, gpu.free, report))
