"""Timelines of requests, built from events on request: which reason held from which step to which.

`observe` is cheap: an event is processed only when a timeline is requested, or when it drops out of the log.
"""

import bisect
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from operator import itemgetter

from scheduler_svc.core.plan import StepPlan
from scheduler_svc.core.reasons import WAITING_QUEUES, CoreEvent, Numbers, Reason

Numbered = tuple[int, CoreEvent]
_SWEEP = 1_024
BETWEEN_PLANS = (Reason.ARRIVED, Reason.WORKER_LOST)
"""Reasons that the next plan may replace in the same step."""


@dataclass(frozen=True, slots=True)
class WaitEpisode:
    """One reason of one sample, from the step that found it to the step that changed it; `to_step` None: it still holds.

    `from_time`, `to_time`: seconds on the core's clock. `sample`: index of the request's sample.
    """

    queue: str
    reason: Reason
    sample: int
    from_step: int
    to_step: int | None
    from_time: float
    to_time: float | None
    numbers: Numbers = field(default_factory=dict)

    @property
    def is_wait(self) -> bool:
        """True if the sample waited, in any queue."""
        return self.queue in WAITING_QUEUES


class Timelines:
    """Log of the last `num_logged` events, plus older events of live requests.

    Events are stored as they come and indexed when a timeline is requested. Of a live request's events that
    dropped out of the log, the first and about the last `num_events` are kept; of each queue, the last
    `num_heads` about its head of line. `is_live`: true for a request id that has not ended.
    """

    def __init__(
        self,
        is_live: Callable[[str], bool],
        *,
        num_logged: int = 65_536,
        num_events: int = 256,
        num_heads: int = 65_536,
    ) -> None:
        self.num_logged, self._num_events = num_logged, num_events
        self._is_live = is_live
        self._log: deque[tuple[int, Sequence[CoreEvent]]] = deque()
        self._count = self._num_in_log = 0
        self._old: dict[str, list[Numbered]] = {}
        self._old_heads: dict[str, deque[Numbered]] = {queue: deque(maxlen=num_heads) for queue in WAITING_QUEUES}
        self._next_sweep = _SWEEP
        self._index = _Index(0, {}, {})

    def observe(self, events: Sequence[CoreEvent]) -> None:
        """Append events in their order; takes ownership of the sequence."""
        if events:
            self._log.append((self._count, events))
            self._count += len(events)
            self._num_in_log += len(events)
            while self._num_in_log > self.num_logged:
                self._leave_log(*self._log.popleft())

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._old or request_id in self._indexed().of_requests

    def episodes(self, request_id: str) -> list[WaitEpisode]:
        """Episodes of a request, sample by sample. Raises KeyError if it is unknown or too old."""
        known = [*self._old.get(request_id, ()), *self._indexed().of_requests.get(request_id, ())]
        events = _last_life(known)
        if not events:
            raise KeyError(request_id)
        samples = list(dict.fromkeys(event.sample for _, event in events))
        return [e for sample in samples for e in self._of_sample(sample, events)]

    # --- inside ------------------------------------------------------------------------------------------------------

    def _leave_log(self, count: int, events: Sequence[CoreEvent]) -> None:
        """Drop events from the log, keeping those of queue heads and of live requests."""
        self._num_in_log -= len(events)
        for number, event in enumerate(events, count + 1):
            if event.of_queue:
                self._old_heads[event.queue].append((number, event))
            request_id = event.request_id
            if request_id and self._is_live(request_id):
                own = self._old.setdefault(request_id, [])
                own.append((number, event))
                if len(own) > self._num_events:
                    del own[1 : len(own) // 2]
        if len(self._old) > self._next_sweep:
            self._old = {request_id: own for request_id, own in self._old.items() if self._is_live(request_id)}
            self._next_sweep = 2 * len(self._old) + _SWEEP

    def _indexed(self) -> "_Index":
        """The log by request and by queue, as of now."""
        if self._index.count != self._count:
            self._index = _Index(self._count, {}, {})
            for count, events in self._log:
                self._index.take(count, events)
        return self._index

    def _of_sample(self, sample: int, events: list[Numbered]) -> Iterator[WaitEpisode]:
        own = [(number, event) for number, event in events if event.sample == sample]
        episode: WaitEpisode | None = None
        for event in self._with_heads(own):
            new = _episode(event, sample)
            if episode is not None and (new.queue, new.reason, _head_reason(new)) == (
                episode.queue,
                episode.reason,
                _head_reason(episode),
            ):
                continue
            if episode is not None:
                over = _ended(episode, event)
                yield over
                new = replace(new, from_time=max(new.from_time, over.to_time or new.from_time))
            episode = new
        if episode is not None and episode.reason is not Reason.ENDED:
            yield episode

    def _with_heads(self, own: list[Numbered]) -> Iterator[CoreEvent]:
        """A sample's own events, merged with what held up the head of its queue between them."""
        for i, (number, event) in enumerate(own):
            yield event
            until = own[i + 1][0] if i + 1 < len(own) else self._count + 1
            for head in self._heads_between(event.queue, number, until):
                if head.step == event.step and event.reason not in BETWEEN_PLANS:
                    continue  # its own event of a step holds for that step, whatever held up the head
                same = head.request_id == event.request_id and head.sample == event.sample
                yield event if same else behind(head)

    def _heads_between(self, queue: str, after: int, before: int) -> Iterator[CoreEvent]:
        for heads in (self._old_heads.get(queue, ()), self._indexed().of_queues.get(queue, ())):
            for i in range(bisect.bisect_right(heads, after, key=itemgetter(0)), len(heads)):
                if heads[i][0] >= before:
                    break
                yield heads[i][1]


@dataclass(slots=True)
class _Index:
    """Numbered events in order, up to event number `count`."""

    count: int
    of_requests: dict[str, list[Numbered]]
    of_queues: dict[str, list[Numbered]]

    def take(self, count: int, events: Sequence[CoreEvent]) -> None:
        """Add the events after number `count`."""
        for number, event in enumerate(events, count + 1):
            if event.of_queue:
                self.of_queues.setdefault(event.queue, []).append((number, event))
            if event.request_id:
                self.of_requests.setdefault(event.request_id, []).append((number, event))


def _last_life(events: list[Numbered]) -> list[Numbered]:
    """The events of the latest request with an id: an id that arrives again after all its samples ended is another request."""
    start, alive, over = 0, set[int](), False
    for i, (_, event) in enumerate(events):
        if event.reason is Reason.ENDED:
            alive.discard(event.sample)
            over = not alive
            continue
        if over and event.reason is Reason.ARRIVED:
            start, over = i, False
        alive.add(event.sample)
    return events[start:]


def now_of(own: CoreEvent, head: CoreEvent | None) -> CoreEvent:
    """The current state of a request: its own last event, or the later one of its queue's `head`.

    A request's own event of a step holds for that step, whatever held up the head.
    """
    if head is None or own.queue not in WAITING_QUEUES:
        return own
    if (head.request_id, head.sample) == (own.request_id, own.sample):
        return head if head.step == own.step and head.reason is own.reason else own
    is_later = head.step > own.step or (head.step == own.step and own.reason in BETWEEN_PLANS)
    return behind(head) if is_later else own


def note_heads(heads: dict[str, CoreEvent], plan: StepPlan) -> None:
    """Update what holds up the head of each queue: its last event, with the numbers of this plan."""
    heads.update((event.queue, event) for event in plan.events if event.of_queue)
    for queue, numbers in plan.head_numbers.items():
        if queue in heads:
            heads[queue] = heads[queue]._replace(numbers=numbers)


def behind(head: CoreEvent) -> CoreEvent:
    """The head's event as it applies to requests behind it. Without a head request, the reason applies to them directly."""
    if not head.request_id:
        return head
    numbers: Numbers = {"head": head.request_id, "head_reason": head.reason.value, **head.numbers}
    return CoreEvent(head.step, head.now, head.queue, Reason.BEHIND, of_queue=True, numbers=numbers)


def _episode(event: CoreEvent, sample: int) -> WaitEpisode:
    return WaitEpisode(event.queue, event.reason, sample, event.step, None, event.now, None, event.numbers)


def _ended(episode: WaitEpisode, event: CoreEvent) -> WaitEpisode:
    return replace(episode, to_step=event.step, to_time=max(event.now, episode.from_time))


def _head_reason(episode: WaitEpisode) -> object:
    return episode.numbers.get("head_reason") if episode.reason is Reason.BEHIND else None
