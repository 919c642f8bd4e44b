"""Orderings: who comes first."""

from scheduler_svc.core.costs import CostBook
from scheduler_svc.core.parts.interfaces import Key
from scheduler_svc.core.request import Group, Request


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


MOST_CLASSES = 10


class Aged:
    """First who should start first:

        start_by = arrival_time + patience_s * (1 + class), where class = priority, not beyond +-MOST_CLASSES
        with a deadline  min(start_by, deadline - least time it takes), as far as the most important class would bring it

    So a class is worth `patience_s`, and who has a deadline and no slack goes before those of its class that are patient still. The
    key does not change while a request waits: its queue stays sorted. Waiting is bounded: nobody who arrives more than
    `longest_overtaking_s` = patience_s * (class + MOST_CLASSES) after a request is served before it, whatever arrives.
    """

    sorts_waiting = True

    def __init__(self, patience_s: float, costs: CostBook) -> None:
        self._patience_s = patience_s
        self._costs = costs

    def key(self, group: Group) -> Key:
        """(`start_by`, arrival time), seconds."""
        return (self.start_by(group.request), group.request.arrival_time)

    def start_by(self, request: Request) -> float:
        """See the class."""
        start_by = request.arrival_time + self._patience_s * (1 + class_of(request))
        if request.deadline is None:
            return start_by
        latest = request.deadline - least_service_s(request, self._costs, num_cached_tokens=0)
        return max(min(start_by, latest), request.arrival_time + self._patience_s * (1 - MOST_CLASSES))

    def longest_overtaking_s(self, request: Request) -> float:
        """How much later than this one a request may arrive and yet be served before it, at most."""
        return self._patience_s * (class_of(request) + MOST_CLASSES)


def class_of(request: Request) -> int:
    """Its priority; those far out count as the outermost."""
    return max(-MOST_CLASSES, min(MOST_CLASSES, request.priority))


def least_service_s(request: Request, costs: CostBook, *, num_cached_tokens: int) -> float:
    """The least time it takes from now to its end, by what costs are known; 0 where none are.

    Its tokens but the cached ones are computed; each output token that it must have takes a step. Stops may end it earlier than
    max_tokens, so those do not count.
    """
    sequence = request.sequences[0]
    num_tokens = sequence.num_tokens - num_cached_tokens
    num_steps = max(1, request.stop.min_tokens - sequence.num_output_tokens)
    return costs.now.compute_s(num_tokens + num_steps - 1) + num_steps * costs.now.step_s
