"""Virtual time: a queue of future events. Nothing here sleeps."""

import heapq
import math
from collections.abc import Callable

Act = Callable[[], None]
_MOST_AT_ONCE = 10_000


class EventQueue:
    """Owner of the virtual time and of the scheduled events. Events at the same time run in the order of scheduling."""

    def __init__(self, start_s: float = 0.0) -> None:
        self.now = start_s
        self._heap: list[tuple[float, int, Act]] = []
        self._count = 0

    def at(self, time_s: float, act: Act) -> None:
        """Run `act` at that time, or now if it is past."""
        heapq.heappush(self._heap, (max(time_s, self.now), self._count, act))
        self._count += 1

    @property
    def next_s(self) -> float:
        """Time of the next event; infinity = none."""
        return self._heap[0][0] if self._heap else math.inf

    def next_moment(self) -> bool:
        """Advance to the next event and run all events of that time, including those that they add; at most 10,000 per call.

        Returns False if there are no events.
        """
        if not self._heap:
            return False
        self.now = self._heap[0][0]
        for _ in range(_MOST_AT_ONCE):
            if not self._heap or self._heap[0][0] > self.now:
                break
            heapq.heappop(self._heap)[2]()
        return True
