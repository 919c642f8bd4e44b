"""Check of the block ledger while the service runs."""

import logging
from collections.abc import Callable

from scheduler_svc.core.plan import StepOutcome, StepPlan
from scheduler_svc.observe.recording.recorder import AnyCore
from scheduler_svc.observe.step_observer import StepObserver
from scheduler_svc.worker_values import WorkerResult

log = logging.getLogger(__name__)


class IntegrityCheck(StepObserver):
    """Checks the ledger of `core()` every `every` steps (0 = never); violations are logged and the service continues."""

    def __init__(self, core: Callable[[], AnyCore | None], every: int) -> None:
        self._core = core
        self._every = every

    def on_result(self, plan: StepPlan, result: WorkerResult, outcome: StepOutcome) -> None:
        """Check the ledger if it is the step's turn."""
        if not self._every or plan.step % self._every:
            return
        core = self._core()
        for violation in core.check_integrity() if core is not None else ():
            log.error("block ledger after step %d: %s", plan.step, violation)
