"""Timelines of requests, put together from events when somebody asks: which reason held from which step to which.

`observe` is cheap and bounded: a request costs the events about itself, a queue the events about its head, whatever stands behind.
"""

import bisect
from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from operator import itemgetter
from typing import Any

from scheduler_svc.core.reasons import WAITING_QUEUES, Event, Numbers, Reason

Numbered = tuple[int, Event]
_BETWEEN_PLANS = (Reason.ARRIVED, Reason.WORKER_LOST)


@dataclass(frozen=True, slots=True)
class Episode:
    """One reason, from the step that found it to the step that changed it; `to_step` None: it holds still.

    `from_time`, `to_time`: seconds on the core's clock. `sample`: of which sample of the request.
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
        """It waited, in whichever queue."""
        return self.queue in WAITING_QUEUES


class Timelines:
    """Owner of the events of live requests and of the last `num_kept` that ended.

    Of each request the first and the last `num_events` are kept, of each queue the last `num_heads` about heads.
    """

    def __init__(self, *, num_kept: int = 2_000, num_events: int = 256, num_heads: int = 65_536) -> None:
        # Of each request numbers and events in turn: one list, as most requests are looked at once in a long while.
        self._accounts: dict[str, list[int | Event]] = {}
        self._num_open: dict[str, int] = {}
        self._over: OrderedDict[str, None] = OrderedDict()
        self._heads: dict[str, deque[Numbered]] = {queue: deque(maxlen=num_heads) for queue in WAITING_QUEUES}
        self.num_kept, self._num_events = num_kept, num_events
        self._count = 0

    def observe(self, events: Iterable[Event]) -> None:
        """Events in the order in which they happened."""
        accounts, over, count, most = self._accounts, self._over, self._count, 2 * self._num_events
        for event in events:
            count += 1
            _, _, queue, reason, request_id, sample, of_queue, _ = event
            if of_queue:
                self._heads[queue].append((count, event))
            if request_id:
                account = accounts.get(request_id)
                if account is None or (reason is Reason.ARRIVED and request_id in over):
                    account = self._open(request_id)
                account += (count, event)
                if reason is Reason.ENDED:
                    self._end(request_id)
                elif sample and reason is Reason.ARRIVED:
                    self._num_open[request_id] = self._num_open.get(request_id, 1) + 1
                elif len(account) > most:
                    del account[2 : len(account) // 4 * 2]
        self._count = count

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._accounts

    def episodes(self, request_id: str) -> list[Episode]:
        """All of a request, sample by sample. KeyError for one that is not known (any more)."""
        account: Any = self._accounts[request_id]
        events: list[Numbered] = list(zip(account[::2], account[1::2], strict=True))
        samples = list(dict.fromkeys(event.sample for _, event in events))
        return [e for sample in samples for e in self._of_sample(sample, events)]

    # --- inside ------------------------------------------------------------------------------------------------------

    def _open(self, request_id: str) -> list[int | Event]:
        """An id that comes again names another request."""
        self._over.pop(request_id, None)
        account = self._accounts[request_id] = []
        return account

    def _end(self, request_id: str) -> None:
        """One of its samples is over; it is, with the last."""
        num_open = self._num_open.get(request_id, 1) - 1
        if num_open:
            self._num_open[request_id] = num_open
            return
        self._num_open.pop(request_id, None)
        self._over[request_id] = None
        if len(self._over) > self.num_kept:
            oldest, _ = self._over.popitem(last=False)
            del self._accounts[oldest]

    def _of_sample(self, sample: int, events: list[Numbered]) -> Iterator[Episode]:
        own = [(number, event) for number, event in events if event.sample == sample]
        episode: Episode | None = None
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

    def _with_heads(self, own: list[Numbered]) -> Iterator[Event]:
        """Its own events, and between them what held up the head of its queue."""
        for i, (number, event) in enumerate(own):
            yield event
            until = own[i + 1][0] if i + 1 < len(own) else self._count + 1
            for head in self._heads_between(event.queue, number, until):
                if head.step == event.step and event.reason not in _BETWEEN_PLANS:
                    continue  # what was found of itself in a step holds for it, whatever held up others
                same = head.request_id == event.request_id and head.sample == event.sample
                yield event if same else _behind(head)

    def _heads_between(self, queue: str, after: int, before: int) -> Iterator[Event]:
        heads = self._heads.get(queue)
        if heads:
            start = bisect.bisect_right(heads, after, key=itemgetter(0))
            for i in range(start, len(heads)):
                if heads[i][0] >= before:
                    break
                yield heads[i][1]


def _behind(head: Event) -> Event:
    """The head's event as those behind it have it; where nobody was looked at, they wait for the same themselves."""
    if not head.request_id:
        return head
    numbers: Numbers = {"head": head.request_id, "head_reason": head.reason.value, **head.numbers}
    return Event(head.step, head.now, head.queue, Reason.BEHIND, of_queue=True, numbers=numbers)


def _episode(event: Event, sample: int) -> Episode:
    return Episode(event.queue, event.reason, sample, event.step, None, event.now, None, event.numbers)


def _ended(episode: Episode, event: Event) -> Episode:
    return replace(episode, to_step=event.step, to_time=max(event.now, episode.from_time))


def _head_reason(episode: Episode) -> object:
    return episode.numbers.get("head_reason") if episode.reason is Reason.BEHIND else None
