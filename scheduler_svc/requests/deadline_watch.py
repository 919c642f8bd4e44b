"""Deadlines of all live requests, in the core or not.

Policies that schedule by deadline keep their own in `core.parts.deadlines`.
"""

import heapq
from collections.abc import Callable, Mapping

from scheduler_svc.requests.live_request import LiveRequest
from svc_common.errors import DeadlineExceeded

_NUM_STALE = 1_000


class DeadlineWatch:
    """Heap of deadlines. `clock`: monotonic ns. `live`: the book's table of requests that have not ended, by id in the core."""

    def __init__(self, clock: Callable[[], int], live: Mapping[str, LiveRequest]) -> None:
        self._clock = clock
        self._live = live
        self._heap: list[tuple[int, str]] = []

    def add(self, core_id: str, deadline_ns: int) -> None:
        """Watch a request that is in the table."""
        heapq.heappush(self._heap, (deadline_ns, core_id))
        if len(self._heap) > 2 * len(self._live) + _NUM_STALE:
            self._heap = [entry for entry in self._heap if self._is_watched(entry)]
            heapq.heapify(self._heap)

    def take_expired(self) -> list[LiveRequest]:
        """Pop the live requests with an expired deadline."""
        now_ns, expired = self._clock(), []
        while self._heap and (self._heap[0][0] <= now_ns or not self._is_watched(self._heap[0])):
            entry = heapq.heappop(self._heap)
            if self._is_watched(entry):
                expired.append(self._live[entry[1]])
        return expired

    @property
    def next_ns(self) -> int | None:
        """Earliest time (monotonic ns) at which `take_expired` may return something; None without deadlines."""
        return self._heap[0][0] if self._heap else None

    def _is_watched(self, entry: tuple[int, str]) -> bool:
        live = self._live.get(entry[1])
        return live is not None and live.submission.deadline_ns == entry[0]


def deadline_passed(*, was_started: bool) -> DeadlineExceeded:
    """The error that a request ends with when its deadline passes."""
    if was_started:
        return DeadlineExceeded("the deadline passed while the request ran", reason="DURING_DECODE")
    return DeadlineExceeded("the deadline passed before the request could be started", reason="EXPIRED_IN_QUEUE")
