"""Why each request is where it is at one moment of a replay: its own last event, or what holds up the head of its queue."""

from scheduler_svc.core.plan import StepPlan
from scheduler_svc.core.reasons import Event, Numbers, Reason
from scheduler_svc.core.request import Place, Request
from scheduler_svc.observe.timelines import note_heads, now_of

BEFORE = "BEFORE"
"""In place of a reason that was told before the recording begins."""


class ReasonsNow:
    """Owner of the last event of each request that lives, and of each queue's head."""

    def __init__(self) -> None:
        self._last: dict[str, Event] = {}
        self._heads: dict[str, Event] = {}

    def copy(self) -> "ReasonsNow":
        """One that goes on from here by itself."""
        other = ReasonsNow()
        other._last, other._heads = dict(self._last), dict(self._heads)
        return other

    def observe(self, plan: StepPlan) -> None:
        """What a plan told."""
        note_heads(self._heads, plan)
        for event in plan.events:
            if event.request_id and event.reason is not Reason.ENDED:
                self._last[event.request_id] = event

    def forget(self, request_id: str) -> None:
        """It is over."""
        self._last.pop(request_id, None)

    def of(self, request: Request) -> tuple[str, str, Numbers]:
        """Queue, reason and numbers; of several samples those of whose changed last."""
        event = self._last.get(request.request_id)
        if event is None:
            places = {group.place for group in request.groups}
            return (Place.RUNNING if Place.RUNNING in places else next(iter(places))).value, BEFORE, {}
        now = now_of(event, self._heads.get(event.queue))
        return event.queue, now.reason.value, now.numbers
