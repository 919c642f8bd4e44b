"""Orderings: who comes first."""

from scheduler_svc.core.parts import Key
from scheduler_svc.core.request import Group


class Fcfs:
    """By arrival; the queue itself keeps that order, and what was preempted goes to its front."""

    sorts_waiting = False

    def key(self, group: Group) -> Key:
        """Arrival time, seconds."""
        return (group.request.arrival_time,)


class Priority:
    """By (priority, arrival time), lower first (R24, R81)."""

    sorts_waiting = True

    def key(self, group: Group) -> Key:
        """Priority, then arrival time."""
        return (group.request.priority, group.request.arrival_time)
