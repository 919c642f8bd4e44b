"""Queues of groups, ordered by an `Ordering`."""

import bisect
from collections import deque
from collections.abc import Iterator
from typing import Protocol

from scheduler_svc.core.parts.interfaces import Key, Ordering
from scheduler_svc.core.request import Group

Item = tuple[Key, str, int, Group]


class GroupQueue(Protocol):
    """A queue of groups; its head is served next."""

    def __len__(self) -> int: ...
    def __iter__(self) -> Iterator[Group]: ...

    def push(self, group: Group) -> None:
        """Add a new group."""

    def push_front(self, group: Group) -> None:
        """Put back a group that was taken out or preempted."""

    def peek(self) -> Group:
        """The head; IndexError when empty."""

    def pop(self) -> Group:
        """Remove and return the head; IndexError when empty."""

    def remove(self, group: Group) -> None:
        """Remove a group anywhere in the queue; ValueError if it is not there."""

    def sort(self, ordering: Ordering) -> None:
        """Sort the queue once by that ordering; equal keys keep their order."""


class ArrivalQueue:
    """First in, first out; groups put back go to the front."""

    def __init__(self) -> None:
        self._items: deque[Group] = deque()

    def __len__(self) -> int:
        return len(self._items)

    def __iter__(self) -> Iterator[Group]:
        return iter(self._items)

    def push(self, group: Group) -> None:
        """Append at the tail."""
        self._items.append(group)

    def push_front(self, group: Group) -> None:
        """Insert at the head."""
        self._items.appendleft(group)

    def peek(self) -> Group:
        """The head."""
        return self._items[0]

    def pop(self) -> Group:
        """Remove and return the head."""
        return self._items.popleft()

    def remove(self, group: Group) -> None:
        """Remove a group."""
        self._items.remove(group)

    def sort(self, ordering: Ordering) -> None:
        """Sort the queue once by that ordering."""
        self._items = deque(sorted(self._items, key=ordering.key))


class SortedQueue:
    """Ordered by a key that does not change while a group waits; ties by request id, as vLLM breaks them.

    Every operation takes logarithmic time in the queue length, plus moving part of a list of pointers.
    """

    def __init__(self, ordering: Ordering) -> None:
        self._ordering = ordering
        self._items: list[Item] = []
        self._item_of: dict[Group, Item] = {}
        self._count = 0

    def __len__(self) -> int:
        return len(self._items)

    def __iter__(self) -> Iterator[Group]:
        return (item[3] for item in self._items)

    def push(self, group: Group) -> None:
        """Insert at the place of its key."""
        self._count += 1
        item = (self._ordering.key(group), group.request.request_id, self._count, group)
        self._item_of[group] = item
        bisect.insort(self._items, item)

    def push_front(self, group: Group) -> None:
        """Insert at the place of its key, like `push`."""
        self.push(group)

    def peek(self) -> Group:
        """The head."""
        return self._items[0][3]

    def pop(self) -> Group:
        """Remove and return the head."""
        group = self._items.pop(0)[3]
        del self._item_of[group]
        return group

    def remove(self, group: Group) -> None:
        """Remove a group, found by its key."""
        item = self._item_of.pop(group, None)
        if item is None:
            raise ValueError(f"request {group.request.request_id} is not in this queue")
        del self._items[bisect.bisect_left(self._items, item)]

    def sort(self, ordering: Ordering) -> None:
        """No-op: the queue is always in its own ordering."""


def queue_for(ordering: Ordering) -> GroupQueue:
    """The queue type for this ordering."""
    return SortedQueue(ordering) if ordering.sorts_waiting else ArrivalQueue()
