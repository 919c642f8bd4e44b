"""Orderings: which group is first in a queue."""

from scheduler_svc.core.parts.costs import CostBook
from scheduler_svc.core.parts.interfaces import Key
from scheduler_svc.core.request import MOST_CLASSES, Group, Request


class Fcfs:
    """First come, first served. The queue itself keeps that order, and preempted groups go to its front."""

    sorts_waiting = False

    def key(self, group: Group) -> Key:
        """Arrival time, seconds."""
        return (group.request.arrival_time,)


class Priority:
    """By (priority, arrival time), lower first."""

    sorts_waiting = True

    def key(self, group: Group) -> Key:
        """Priority, then arrival time."""
        return (group.request.priority, group.request.arrival_time)


class AgingPriority:
    """Priority with aging: order by the time at which a request should start.

        start_by = arrival_time + patience_s * (1 + class), where class = request.priority_class
        with a deadline: min(start_by, deadline - least service time), but no sooner than the top class would get

    So one class is worth `patience_s` of waiting, and a request with a tight deadline precedes those
    of its class that can wait. The key does not change while a request waits, so its queue stays sorted.
    Waiting is bounded: no request that arrives more than patience_s * (class + MOST_CLASSES) after another is served
    before it, whatever the load.
    """

    sorts_waiting = True

    def __init__(self, patience_s: float, costs: CostBook) -> None:
        self._patience_s = patience_s
        self._costs = costs

    def key(self, group: Group) -> Key:
        """(`start_by`, arrival time), seconds; see the class."""
        request = group.request
        start_by = request.arrival_time + self._patience_s * (1 + request.priority_class)
        if request.deadline is not None:
            latest = request.deadline - least_service_s(request, self._costs, num_cached_tokens=0)
            start_by = max(min(start_by, latest), request.arrival_time + self._patience_s * (1 - MOST_CLASSES))
        return (start_by, request.arrival_time)


def least_service_s(request: Request, costs: CostBook, *, num_cached_tokens: int) -> float:
    """Least time in seconds from now to the request's end, by known costs; 0 if none are known.

    It computes all its tokens but the cached ones, and takes one step per output token up to min_tokens. A stop
    may end it before max_tokens, so those do not count.
    """
    sequence, now = request.groups[0].sequences[0], costs.now
    num_tokens = len(sequence.token_ids)
    num_steps = max(1, sequence.num_prompt_tokens + request.stop.min_tokens - num_tokens)
    return (num_tokens - num_cached_tokens + num_steps - 1) * now.compute_token_s + num_steps * now.step_s
