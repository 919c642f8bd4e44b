"""Deadlines of accepted requests, wherever they stand: whose has passed, and when the next one does.

The core's own, of policies that look at deadlines, are in `core.deadlines`.
"""

import heapq
from collections.abc import Callable, Mapping

from scheduler_svc.requests.live_request import LiveRequest
from svc_common.errors import DeadlineExceeded

_NUM_STALE = 1_000


class DeadlineWatch:
    """Owner of the deadlines. `clock`: monotonic ns. `live`: requests that have not ended, by id in the core; the book's table."""

    def __init__(self, clock: Callable[[], int], live: Mapping[str, LiveRequest]) -> None:
        self._clock = clock
        self._live = live
        self._heap: list[tuple[int, str]] = []

    def add(self, core_id: str, deadline_ns: int) -> None:
        """Watches a request that is in the table."""
        heapq.heappush(self._heap, (deadline_ns, core_id))
        if len(self._heap) > 2 * len(self._live) + _NUM_STALE:
            self._heap = [entry for entry in self._heap if self._is_watched(entry)]
            heapq.heapify(self._heap)

    def take_expired(self) -> list[LiveRequest]:
        """Requests whose deadline has passed and that have not ended."""
        now_ns, expired = self._clock(), []
        while self._heap and (self._heap[0][0] <= now_ns or not self._is_watched(self._heap[0])):
            entry = heapq.heappop(self._heap)
            if self._is_watched(entry):
                expired.append(self._live[entry[1]])
        return expired

    @property
    def next_ns(self) -> int | None:
        """When `take_expired` has something next, at the latest."""
        return self._heap[0][0] if self._heap else None

    def _is_watched(self, entry: tuple[int, str]) -> bool:
        live = self._live.get(entry[1])
        return live is not None and live.submission.deadline_ns == entry[0]


def deadline_passed(*, was_started: bool) -> DeadlineExceeded:
    """The end that it brings."""
    if was_started:
        return DeadlineExceeded("the deadline passed while the request ran", reason="DURING_DECODE")
    return DeadlineExceeded("the deadline passed before the request could be started", reason="EXPIRED_IN_QUEUE")
