"""Items by deadline, on any clock."""

import heapq
from collections.abc import Callable
from typing import Generic, TypeVar

_NUM_STALE = 1_000

Item = TypeVar("Item")


class DeadlineHeap(Generic[Item]):
    """Heap of items by deadline. `is_over(item, deadline)`: that deadline of the item no longer matters."""

    def __init__(self, is_over: Callable[[Item, float], bool]) -> None:
        self._is_over = is_over
        self._entries: list[tuple[float, int, Item]] = []
        self._count = 0

    def __len__(self) -> int:
        return len(self._entries)

    def add(self, deadline: float, item: Item, num_live: int) -> None:
        """Add an item; those that are over are removed once they outnumber the `num_live` others by far."""
        self._count += 1
        heapq.heappush(self._entries, (deadline, self._count, item))
        if len(self._entries) > 2 * num_live + _NUM_STALE:
            self._entries = [entry for entry in self._entries if not self._is_over(entry[2], entry[0])]
            heapq.heapify(self._entries)

    def pop_expired(self, now: float) -> list[Item]:
        """Remove and return the items past their deadline that are not over; each is returned once."""
        expired = []
        while self._entries and self._entries[0][0] <= now:
            deadline, _, item = heapq.heappop(self._entries)
            if not self._is_over(item, deadline):
                expired.append(item)
        return expired

    def earliest(self) -> float | None:
        """Earliest deadline of an item that is not over; None if there is none."""
        while self._entries and self._is_over(self._entries[0][2], self._entries[0][0]):
            heapq.heappop(self._entries)
        return self._entries[0][0] if self._entries else None
