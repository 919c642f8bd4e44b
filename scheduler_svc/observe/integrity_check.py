"""Check of the block ledger while the service runs."""

import logging
from collections.abc import Callable

from scheduler_svc.core.plan import StepOutcome, StepPlan
from scheduler_svc.observe.recording.recorder import AnyCore
from scheduler_svc.observe.step_observer import StepObserver
from scheduler_svc.worker_values import WorkerResult

log = logging.getLogger(__name__)


class IntegrityCheck(StepObserver):
    """Checks a ledger of `core()` every `every` steps (0 = never); violations are logged and the service continues.

    The ledgers of several workers take turns.
    """

    def __init__(self, core: Callable[[], AnyCore | None], every: int) -> None:
        self._core = core
        self._every = every
        self._turn = 0

    def on_result(self, plan: StepPlan, result: WorkerResult, outcome: StepOutcome) -> None:
        """Check a ledger if it is the step's turn."""
        core = self._core()
        if not self._every or core is None or plan.step % self._every:
            return
        self._turn += 1
        for violation in core.check_integrity(self._turn):
            log.error("block ledger after step %d: %s", plan.step, violation)
