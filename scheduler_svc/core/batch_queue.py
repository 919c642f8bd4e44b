"""The batch queue: who waits for which result when several plans are under way at once (R147, R153).

A pure object over a `Scheduler`; whoever drives it sends plans off and awaits results. One step is

    plan = queue.plan(now)                  # sent off at once; an empty one has an empty result
    if queue.due: queue.update(result)      # of exactly that plan, once it is there

At depth 1 this is the plain loop: every plan is due as soon as it is made.
"""

from collections import deque
from collections.abc import Iterable

from scheduler_svc.core.plan import StepOutcome, StepPlan, StepResult
from scheduler_svc.core.scheduler import Scheduler


class BatchQueue:
    """Owner of the order of plans under way, empty ones too, and of aborts that wait for the next update.

    It holds as many plans as the core may have under way (`Scheduler.depth`). Filling it comes first: a result is awaited only when
    it is full, or when there was nothing to schedule.
    """

    def __init__(self, core: Scheduler) -> None:
        self._core = core
        self._under_way: deque[StepPlan] = deque()
        self._is_dry = False
        self._aborts: dict[str, None] = {}

    def __len__(self) -> int:
        """Plans under way."""
        return len(self._under_way)

    @property
    def is_idle(self) -> bool:
        """No request is left and no result is to come."""
        return not (self._core.has_unfinished or self._under_way)

    @property
    def due(self) -> StepPlan | None:
        """The plan whose result must be awaited before the next step; None: go on and plan."""
        is_full = len(self._under_way) == self._core.depth
        return self._under_way[0] if self._under_way and (is_full or self._is_dry) else None

    def plan(self, now: float) -> StepPlan | None:
        """The next plan, to be sent off. None: nothing is left to schedule or to tell the workers, or the queue is full."""
        if len(self._under_way) == self._core.depth:
            return None
        if not (self._core.has_unfinished or self._core.has_endings_to_tell):
            self._is_dry = True
            return None
        [plan] = self._core.schedule(now)
        self._under_way.append(plan)
        self._is_dry = plan.is_empty
        return plan

    def abort_later(self, request_ids: Iterable[str]) -> None:
        """Keeps aborts that arrive while a plan is executed; they are applied as one batch just before the next update (R153)."""
        self._aborts.update(dict.fromkeys(request_ids))

    def update(self, result: StepResult, now: float | None = None) -> StepOutcome:
        """Applies kept aborts, then the oldest plan's result, as `Scheduler.update`. ValueError for the result of another plan."""
        if not self._under_way or self._under_way[0].step != result.step:
            raise ValueError(f"step {result.step} is not the oldest under way")
        self._under_way.popleft()
        self._is_dry = False
        aborts, self._aborts = list(self._aborts), {}
        aborted = self._core.abort(aborts)
        outcome = self._core.update(result, now)
        outcome.ended[:0] = aborted
        return outcome
