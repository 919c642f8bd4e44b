"""Virtual time: what happens next, and when. Nothing here waits."""

import heapq
import math
from collections.abc import Callable

Act = Callable[[], None]
_MOST_AT_ONCE = 10_000


class EventQueue:
    """Owner of the time and of what is to come. Acts of one moment happen in the order they were asked for."""

    def __init__(self, start_s: float = 0.0) -> None:
        self.now = start_s
        self._heap: list[tuple[float, int, Act]] = []
        self._count = 0

    def at(self, time_s: float, act: Act) -> None:
        """`act` happens then; not before now."""
        heapq.heappush(self._heap, (max(time_s, self.now), self._count, act))
        self._count += 1

    @property
    def next_s(self) -> float:
        """When the next thing happens; infinity = never."""
        return self._heap[0][0] if self._heap else math.inf

    def next_moment(self) -> bool:
        """Moves to the next moment and lets all of it happen, what it asks for at once included; of very much at once a part.

        False: nothing is to come.
        """
        if not self._heap:
            return False
        self.now = self._heap[0][0]
        for _ in range(_MOST_AT_ONCE):
            if not self._heap or self._heap[0][0] > self.now:
                break
            heapq.heappop(self._heap)[2]()
        return True
