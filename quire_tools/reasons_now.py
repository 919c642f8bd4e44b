"""Each request's current queue and reason during a replay: its own last event, or what blocks the head of its queue."""

from scheduler_svc.core.plan import StepPlan
from scheduler_svc.core.reasons import CoreEvent, Numbers, Reason
from scheduler_svc.core.request import QueueKind, Request
from scheduler_svc.observe.timelines import note_heads, now_of

BEFORE = "BEFORE"
"""Stands for a reason that was reported before the recording begins."""


class ReasonsNow:
    """Tracks the last event of each unfinished request, and of the head of each queue."""

    def __init__(self) -> None:
        self._last: dict[str, CoreEvent] = {}
        self._heads: dict[str, CoreEvent] = {}

    def copy(self) -> "ReasonsNow":
        """An independent copy."""
        other = ReasonsNow()
        other._last, other._heads = dict(self._last), dict(self._heads)
        return other

    def observe(self, plan: StepPlan) -> None:
        """Record the events of a plan, and drop requests that it finished."""
        note_heads(self._heads, plan)
        for event in plan.events:
            if event.request_id and event.reason is not Reason.ENDED:
                self._last[event.request_id] = event
        for request_id in plan.finished:
            self._last.pop(request_id, None)

    def of(self, request: Request) -> tuple[str, str, Numbers]:
        """Queue, reason and numbers; if the request has several samples, of the sample with the latest event."""
        event = self._last.get(request.request_id)
        if event is None:
            places = {group.place for group in request.groups}
            return (QueueKind.RUNNING if QueueKind.RUNNING in places else next(iter(places))).value, BEFORE, {}
        now = now_of(event, self._heads.get(event.queue))
        return event.queue, now.reason.value, now.numbers
