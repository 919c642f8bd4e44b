"""Log of preemptions: the first, and each fiftieth after it."""

import logging
from collections.abc import Callable

from scheduler_svc.core.plan import StepPlan
from scheduler_svc.observe.step_observer import StepObserver
from scheduler_svc.observe.step_record import StepOrigin
from svc_common.observability.log_context import LogContext

log = logging.getLogger(__name__)

_PREEMPTIONS_PER_WARNING = 50


class PreemptionWarnings(StepObserver):
    """Warns of preemption 1, 51, 101, ... since the start. `log_extra(core_id)`: `extra` of a log line about that request."""

    def __init__(self, log_extra: Callable[[str], dict[str, LogContext]]) -> None:
        self._log_extra = log_extra

    def on_plan(self, plan: StepPlan, origin: StepOrigin) -> None:
        """Log the plan's preemptions that are due."""
        if not plan.preempted:
            return
        first = plan.num_cumulative_preemptions - len(plan.preempted) + 1
        for number, (request_id, mode) in enumerate(plan.preempted, first):
            if number % _PREEMPTIONS_PER_WARNING == 1:
                about = self._log_extra(request_id)
                log.warning("preemption %d since the start: request %s, by %s", number, request_id, mode, extra=about)
