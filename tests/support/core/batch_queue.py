"""The batch queue: tracks plans in flight and which result must be awaited next.

A pure object over a `Scheduler`; its caller sends plans and awaits results. One step is

    plan = queue.plan(now)                 # send at once; an empty plan has an empty result
    if queue.due: queue.update(result)     # the result of exactly that plan

At depth 1 every plan is due as soon as it is made.
"""

from collections import deque
from collections.abc import Iterable

from scheduler_svc.core.plan import StepOutcome, StepPlan, StepResult
from scheduler_svc.core.scheduler import Scheduler


class BatchQueue:
    """Owner of the order of plans in flight, empty ones included, and of aborts deferred to the next update.

    It holds up to `Scheduler.depth` plans. Filling it takes precedence: a result is awaited only when the queue
    is full or when there was nothing to schedule.
    """

    def __init__(self, core: Scheduler) -> None:
        self._core = core
        self._in_flight: deque[StepPlan] = deque()
        self._is_dry = False
        self._aborts: dict[str, None] = {}

    def __len__(self) -> int:
        """Number of plans in flight."""
        return len(self._in_flight)

    @property
    def is_idle(self) -> bool:
        """True if no request is left and no result is pending."""
        return not (self._core.has_unfinished or self._in_flight)

    @property
    def due(self) -> StepPlan | None:
        """The plan to await a result of before the next step; None: plan first."""
        is_full = len(self._in_flight) == self._core.depth
        return self._in_flight[0] if self._in_flight and (is_full or self._is_dry) else None

    def plan(self, now: float) -> StepPlan | None:
        """Make the next plan. None if there is nothing to schedule or to tell the workers, or the queue is full."""
        if len(self._in_flight) == self._core.depth:
            return None
        if not (self._core.has_unfinished or self._core.has_endings_to_tell):
            self._is_dry = True
            return None
        [plan] = self._core.schedule(now)
        self._in_flight.append(plan)
        self._is_dry = plan.is_empty
        return plan

    def abort_later(self, request_ids: Iterable[str]) -> None:
        """Defer aborts that arrive during a step; they are applied together just before the next update."""
        self._aborts.update(dict.fromkeys(request_ids))

    def update(self, result: StepResult, now: float | None = None) -> StepOutcome:
        """Apply deferred aborts, then the oldest plan's result, as `Scheduler.update` does.

        ValueError for the result of another plan.
        """
        if not self._in_flight or self._in_flight[0].step != result.step:
            raise ValueError(f"step {result.step} is not the oldest in flight")
        self._in_flight.popleft()
        self._is_dry = False
        aborts, self._aborts = list(self._aborts), {}
        aborted = self._core.abort(aborts)
        outcome = self._core.update(result, now)
        outcome.ended[:0] = aborted
        return outcome
