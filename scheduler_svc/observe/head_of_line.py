"""History of each waiting queue's head of line, to explain the waits of requests behind it, which the plan did not examine.

`timelines` combines heads and requests in the same way, but rarely; this module is read once per wait, and so
returns only heads at which the reason changed.
"""

from bisect import bisect_right
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from operator import itemgetter

from scheduler_svc.core.reasons import WAITING_QUEUES, CoreEvent

_NUM_HEADS = 4_096

Numbered = tuple[int, CoreEvent]


@dataclass(slots=True)
class _Heads:
    """Heads of one queue: all recent ones, and those with another reason than the one before."""

    all: deque[Numbered] = field(default_factory=lambda: deque(maxlen=_NUM_HEADS))
    turns: deque[Numbered] = field(default_factory=lambda: deque(maxlen=_NUM_HEADS))


class QueueHeads:
    """Recent heads of each queue. `position`: number of head events observed so far, over all queues."""

    def __init__(self) -> None:
        self._queues = {queue: _Heads() for queue in WAITING_QUEUES}
        self.position = 0

    def observe(self, event: CoreEvent) -> None:
        """Add the event of a queue's head; called in order."""
        self.position += 1
        heads, numbered = self._queues[event.queue], (self.position, event)
        last = heads.all[-1][1] if heads.all else None
        if last is None or (last.reason, bool(last.request_id)) != (event.reason, bool(event.request_id)):
            heads.turns.append(numbered)
        heads.all.append(numbered)

    def since(self, queue: str, position: int, not_in_step: int) -> Iterator[CoreEvent]:
        """The first head after `position`, and later ones with a changed reason; none of the step `not_in_step`."""
        heads = self._queues[queue]
        first = next((n for n in _after(heads.all, position) if n[1].step != not_in_step), None)
        if first is not None:
            yield first[1]
            yield from (event for _, event in _after(heads.turns, first[0]))


def _after(heads: deque[Numbered], position: int) -> Iterator[Numbered]:
    for i in range(bisect_right(heads, position, key=itemgetter(0)), len(heads)):
        yield heads[i]
