"""Orderings: who comes first."""

from scheduler_svc.core.parts import Key
from scheduler_svc.core.request import Sequence


class Fcfs:
    """By arrival; the queue itself keeps that order, and what was preempted goes to its front."""

    sorts_waiting = False

    def key(self, sequence: Sequence) -> Key:
        """Arrival time, seconds."""
        return (sequence.request.arrival_time,)


class Priority:
    """By (priority, arrival time), lower first (R24, R81)."""

    sorts_waiting = True

    def key(self, sequence: Sequence) -> Key:
        """Priority, then arrival time, then id, so that the order never depends on anything else."""
        request = sequence.request
        return (request.priority, request.arrival_time, request.request_id)
