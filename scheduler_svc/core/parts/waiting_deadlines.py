"""Deadlines of waiting requests: reject infeasible ones, and drop those that are still waiting at their deadline.

A running request ends at its deadline too: `scheduler_svc.requests.deadlines`, by the service's clock.
"""

import heapq
from collections.abc import Callable
from typing import Generic, TypeVar

from scheduler_svc.core.parts.costs import CostBook
from scheduler_svc.core.parts.ordering import least_service_s
from scheduler_svc.core.plan_builder import PlanBuilder
from scheduler_svc.core.request import QueueKind, Request, SequenceStatus
from scheduler_svc.core.state import CoreState
from svc_common.errors import DeadlineExceeded

EXPIRED = "its deadline passed before it could be started"
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


class Deadlines(DeadlineHeap[Request]):
    """Owner of the deadlines of unfinished requests. A request without one costs nothing."""

    def __init__(self, costs: CostBook) -> None:
        super().__init__(_is_finished)
        self._costs = costs

    def take(self, request: Request, state: CoreState) -> None:
        """Watch a request's deadline. DeadlineExceeded (INFEASIBLE) if even an idle worker would miss it.

        Cached tokens, including those that steps in flight will compute, count as computed.
        """
        if request.deadline is None:
            return
        first = request.groups[0].sequences[0]
        cached = state.shared.num_most_cached(first)
        needs_s = least_service_s(request, self._costs, num_cached_tokens=cached)
        has_s = request.deadline - max(request.arrival_time, state.journal.now)
        if needs_s > has_s:
            state.cache.forget(first)
            raise infeasible(request, needs_s, has_s)
        self.add(request.deadline, request, len(state.requests))


class DropExpired:
    """First phase of a step: end requests that are waiting or swapped out when their deadline passes.

    Running requests are left to the service, which cancels them by its own clock.
    """

    def __init__(self, deadlines: Deadlines) -> None:
        self._deadlines = deadlines

    def run(self, state: CoreState, builder: PlanBuilder) -> None:
        """End expired requests that hold no device blocks."""
        for request in self._deadlines.pop_expired(builder.now):
            for group in request.groups:
                if group.place in (QueueKind.WAITING, QueueKind.SWAPPED):
                    owner = state.shared.workers[group.worker]  # which may have it swapped out
                    builder.ended += owner.retire_group(group, SequenceStatus.FINISHED_ABORTED, EXPIRED)


def infeasible(request: Request, needs_s: float, has_s: float) -> DeadlineExceeded:
    """The error for an infeasible deadline, with its numbers."""
    return DeadlineExceeded(
        f"request {request.request_id} needs at least {needs_s:.3f} s and has {max(0.0, has_s):.3f} s until its deadline",
        reason="INFEASIBLE",
        metadata={"needs_s": f"{needs_s:.6f}", "has_s": f"{has_s:.6f}"},
    )


def _is_finished(request: Request, deadline: float) -> bool:
    return request.is_finished
