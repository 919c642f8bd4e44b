"""Queues of sequences in the order that an ordering gives them."""

import bisect
from collections import deque
from collections.abc import Iterator
from typing import Protocol

from scheduler_svc.core.parts import Key, Ordering
from scheduler_svc.core.request import Sequence


class SequenceQueue(Protocol):
    """A queue whose head is served next."""

    def __len__(self) -> int: ...
    def __iter__(self) -> Iterator[Sequence]: ...

    def push(self, sequence: Sequence) -> None:
        """Adds a newcomer."""

    def push_front(self, sequence: Sequence) -> None:
        """Puts one back that was taken out or preempted."""

    def peek(self) -> Sequence:
        """The head; IndexError when empty."""

    def pop(self) -> Sequence:
        """Takes the head; IndexError when empty."""

    def remove(self, sequence: Sequence) -> None:
        """Takes one out of the middle; ValueError when it is not there (R30)."""


class ArrivalQueue:
    """First in, first out; what is put back goes to the front (R44, R131)."""

    def __init__(self) -> None:
        self._items: deque[Sequence] = deque()

    def __len__(self) -> int:
        return len(self._items)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._items)

    def push(self, sequence: Sequence) -> None:
        """Adds at the tail."""
        self._items.append(sequence)

    def push_front(self, sequence: Sequence) -> None:
        """Adds at the head."""
        self._items.appendleft(sequence)

    def peek(self) -> Sequence:
        """The head."""
        return self._items[0]

    def pop(self) -> Sequence:
        """Takes the head."""
        return self._items.popleft()

    def remove(self, sequence: Sequence) -> None:
        """Takes one out."""
        self._items.remove(sequence)


class SortedQueue:
    """Ordered by a key that does not change while a sequence waits; equal keys keep their order of coming."""

    def __init__(self, ordering: Ordering) -> None:
        self._ordering = ordering
        self._items: list[tuple[Key, int, Sequence]] = []
        self._count = 0

    def __len__(self) -> int:
        return len(self._items)

    def __iter__(self) -> Iterator[Sequence]:
        return (item[2] for item in self._items)

    def push(self, sequence: Sequence) -> None:
        """Adds where its key puts it."""
        self._count += 1
        bisect.insort(self._items, (self._ordering.key(sequence), self._count, sequence))

    def push_front(self, sequence: Sequence) -> None:
        """The same: the key decides alone."""
        self.push(sequence)

    def peek(self) -> Sequence:
        """The head."""
        return self._items[0][2]

    def pop(self) -> Sequence:
        """Takes the head."""
        return self._items.pop(0)[2]

    def remove(self, sequence: Sequence) -> None:
        """Takes one out."""
        for i, item in enumerate(self._items):
            if item[2] is sequence:
                del self._items[i]
                return
        raise ValueError(f"{sequence.name} is not in this queue")


def queue_for(ordering: Ordering) -> SequenceQueue:
    """The queue that serves in this ordering."""
    return SortedQueue(ordering) if ordering.sorts_waiting else ArrivalQueue()
