"""Measured step costs for the core: the one path from an observer back to it."""

from collections import defaultdict
from collections.abc import Callable

from scheduler_svc.core.plan import StepOutcome, StepPlan
from scheduler_svc.observe.recording.recorder import AnyCore
from scheduler_svc.observe.step_observer import StepObserver
from scheduler_svc.worker_values import WorkerResult
from scheduler_svc.workers.cost_meter import CostMeter


class CostFeedback(StepObserver):
    """Measures the steps of each worker, and gives the core new cost estimates once they change noticeably. A new core is
    measured anew.

    `core()`: the core in use.
    """

    def __init__(self, core: Callable[[], AnyCore | None]) -> None:
        self._core = core
        self._measured: AnyCore | None = None
        self._meters: defaultdict[int, CostMeter] = defaultdict(CostMeter)

    def on_result(self, plan: StepPlan, result: WorkerResult, outcome: StepOutcome) -> None:
        """Measure a step."""
        if result.error is not None:
            return
        core = self._core()
        if core is None:
            return
        if core is not self._measured:
            self._measured = core
            self._meters.clear()
        worker = core.worker_of(plan.lane)
        num_moved = len(plan.swap_in) + len(plan.swap_out)
        costs = self._meters[worker].observe(plan.num_tokens, num_moved, result.duration_ns)
        if costs is not None:
            core.observe_costs(costs, worker)
