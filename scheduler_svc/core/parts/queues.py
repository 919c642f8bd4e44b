"""Queues of groups in the order that an ordering gives them."""

import bisect
from collections import deque
from collections.abc import Iterator
from typing import Protocol

from scheduler_svc.core.parts.interfaces import Key, Ordering
from scheduler_svc.core.request import Group

Item = tuple[Key, str, int, Group]


class GroupQueue(Protocol):
    """A queue whose head is served next."""

    def __len__(self) -> int: ...
    def __iter__(self) -> Iterator[Group]: ...

    def push(self, group: Group) -> None:
        """Adds a newcomer."""

    def push_front(self, group: Group) -> None:
        """Puts one back that was taken out or preempted."""

    def peek(self) -> Group:
        """The head; IndexError when empty."""

    def pop(self) -> Group:
        """Takes the head; IndexError when empty."""

    def remove(self, group: Group) -> None:
        """Takes one out of the middle; ValueError when it is not there (R30)."""

    def sort(self, ordering: Ordering) -> None:
        """Puts all in that ordering once; equal keys keep their order (R82)."""


class ArrivalQueue:
    """First in, first out; what is put back goes to the front (R44, R131)."""

    def __init__(self) -> None:
        self._items: deque[Group] = deque()

    def __len__(self) -> int:
        return len(self._items)

    def __iter__(self) -> Iterator[Group]:
        return iter(self._items)

    def push(self, group: Group) -> None:
        """Adds at the tail."""
        self._items.append(group)

    def push_front(self, group: Group) -> None:
        """Adds at the head."""
        self._items.appendleft(group)

    def peek(self) -> Group:
        """The head."""
        return self._items[0]

    def pop(self) -> Group:
        """Takes the head."""
        return self._items.popleft()

    def remove(self, group: Group) -> None:
        """Takes one out."""
        self._items.remove(group)

    def sort(self, ordering: Ordering) -> None:
        """Puts all in that ordering once."""
        self._items = deque(sorted(self._items, key=ordering.key))


class SortedQueue:
    """Ordered by a key that does not change while a group waits; equal keys by request id, as the reference breaks ties.

    Whatever happens costs the logarithm of its length, but for moving a part of one list of pointers.
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
        """Adds where its key puts it."""
        self._count += 1
        item = (self._ordering.key(group), group.request.request_id, self._count, group)
        self._item_of[group] = item
        bisect.insort(self._items, item)

    def push_front(self, group: Group) -> None:
        """The same: the key decides alone."""
        self.push(group)

    def peek(self) -> Group:
        """The head."""
        return self._items[0][3]

    def pop(self) -> Group:
        """Takes the head."""
        group = self._items.pop(0)[3]
        del self._item_of[group]
        return group

    def remove(self, group: Group) -> None:
        """Takes one out, found by its key."""
        item = self._item_of.pop(group, None)
        if item is None:
            raise ValueError(f"request {group.request.request_id} is not in this queue")
        del self._items[bisect.bisect_left(self._items, item)]

    def sort(self, ordering: Ordering) -> None:
        """Sorted it is already, and stays in its own ordering."""


def queue_for(ordering: Ordering) -> GroupQueue:
    """The queue that serves in this ordering."""
    return SortedQueue(ordering) if ordering.sorts_waiting else ArrivalQueue()
