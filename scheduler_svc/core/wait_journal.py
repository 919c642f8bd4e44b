"""Record why groups wait while decisions are made. Costs one call per examined group, however long the queue is."""

import functools

from scheduler_svc.core.reasons import NOTHING, CoreEvent, Numbers, Reason
from scheduler_svc.core.request import Group, QueueKind, SequenceStatus

# A NamedTuple's own constructor takes several times as long, and events are made in every step.
_event = functools.partial(tuple.__new__, CoreEvent)
_WAITING, _RUNNING = QueueKind.WAITING.value, QueueKind.RUNNING.value
_ENDS: dict[SequenceStatus, Numbers] = {status: {"end": status.name} for status in SequenceStatus}


class WaitJournal:
    """Owner of the events since they were last taken. A reason is recorded when it changes, with the numbers of
    that moment.

    The numbers of each queue's head of line are kept current as they change from step to step.
    """

    __slots__ = ("_events", "_heads", "_num_heads", "_numbers", "now", "step")

    def __init__(self) -> None:
        self.step = 1
        self.now = 0.0
        self._events: list[CoreEvent] = []
        self._heads: dict[QueueKind, tuple[str, int, Reason]] = {}
        self._num_heads = 0
        self._numbers: dict[str, Numbers] = {}

    def begin(self, step: int, now: float) -> None:
        """Attribute later events to the plan of that step."""
        self.step, self.now = step, now

    def take(self) -> tuple[list[CoreEvent], dict[str, Numbers]]:
        """Remove and return the events so far, in order; and by queue, the numbers that last held up its head, since
        any group moved.
        """
        taken, self._events = self._events, []
        return taken, dict(self._numbers)

    def arrived(self, group: Group) -> None:
        """A group arrived; the next plan may examine it."""
        self._numbers.pop(_WAITING, None)
        # The reason for the whole queue is recorded again, to cover the new group.
        self._heads.pop(QueueKind.WAITING, None)
        group.waits_for = None
        self._note(group.request.arrival_time, group, _WAITING, Reason.ARRIVED, NOTHING)

    def skip(self, group: Group, reason: Reason, **numbers: int | float | str) -> None:
        """The group was examined and stays in its queue; those behind it may pass."""
        if group.waits_for is not reason or group.seen_heads != self._num_heads:
            group.waits_for, group.seen_heads = reason, self._num_heads
            self._note(self.now, group, group.place.value, reason, numbers)

    def stop(self, group: Group, reason: Reason, **numbers: int | float | str) -> None:
        """The group was examined and stays in its queue, and all groups behind it wait for the same."""
        head = (group.request.request_id, _sample(group), reason)
        self._numbers[group.place.value] = numbers
        if self._heads.get(group.place) != head:
            self._heads[group.place] = head
            self._num_heads += 1
            group.waits_for, group.seen_heads = reason, self._num_heads
            self._note(self.now, group, group.place.value, reason, numbers, of_queue=True)

    def stop_all(self, place: QueueKind, reason: Reason, **numbers: int | float | str) -> None:
        """No group of that queue was examined."""
        self._numbers[place.value] = numbers
        if self._heads.get(place) != ("", 0, reason):
            self._heads[place] = ("", 0, reason)
            self._num_heads += 1
            self._events.append(_event((self.step, self.now, place.value, reason, "", 0, True, numbers)))

    def runs(self, group: Group, computed_tokens: int) -> None:
        """The group has blocks, with `computed_tokens` that need no computing, and its first share of a step."""
        numbers = {"computed_tokens": computed_tokens} if computed_tokens else NOTHING
        self._moves(group, _RUNNING, Reason.RUNNING, numbers)

    def moved(self, group: Group, source: int, worker: int) -> None:
        """The group goes on on another worker group."""
        self._moves(group, _RUNNING, Reason.MOVED, {"source": source, "worker": worker})

    def leaves(self, group: Group, place: QueueKind, reason: Reason, **numbers: int | float | str) -> None:
        """The group was running, or about to be resumed, and waits again in the queue of that place."""
        self._moves(group, place.value, reason, numbers)

    def ended(self, group: Group, status: SequenceStatus) -> None:
        """The group's last sequence ended."""
        group.waits_for = None
        self._note(self.now, group, "", Reason.ENDED, _ENDS[status])

    def _moves(self, group: Group, queue: str, reason: Reason, numbers: Numbers) -> None:
        self._heads.clear()
        self._numbers.clear()
        group.waits_for, group.seen_heads = reason, self._num_heads
        self._note(self.now, group, queue, reason, numbers)

    def _note(
        self, at: float, group: Group, queue: str, reason: Reason, numbers: Numbers, *, of_queue: bool = False
    ) -> None:
        request_id = group.request.request_id
        self._events.append(_event((self.step, at, queue, reason, request_id, _sample(group), of_queue, numbers)))


def _sample(group: Group) -> int:
    """Index of the group within its request."""
    groups = group.request.groups
    return 0 if len(groups) == 1 else groups.index(group)
