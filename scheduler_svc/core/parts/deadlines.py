"""Deadlines: reject infeasible requests, and drop requests that are still waiting at their deadline."""

import heapq

from scheduler_svc.core.parts.costs import CostBook
from scheduler_svc.core.parts.ordering import least_service_s
from scheduler_svc.core.request import QueueKind, Request, SequenceStatus
from scheduler_svc.core.state import CoreState
from scheduler_svc.core.step_draft import StepDraft
from svc_common.errors import DeadlineExceeded

EXPIRED = "its deadline passed before it could be started"
_NUM_STALE = 1_000


class Deadlines:
    """Owner of the deadlines of unfinished requests. A request without one costs nothing."""

    def __init__(self, costs: CostBook) -> None:
        self._costs = costs
        self._heap: list[tuple[float, int, Request]] = []
        self._count = 0

    def take(self, request: Request, state: CoreState) -> None:
        """Watch a request's deadline. DeadlineExceeded (INFEASIBLE) if even an idle worker would miss it.

        Cached tokens, including those that steps in flight will compute, count as computed.
        """
        if request.deadline is None:
            return
        cached = state.cache.lookup(request.sequences[0]).num_tokens
        needs_s = least_service_s(request, self._costs, num_cached_tokens=cached)
        has_s = request.deadline - max(request.arrival_time, state.journal.now)
        if needs_s > has_s:
            state.cache.forget(request.sequences[0])
            raise infeasible(request, needs_s, has_s)
        self._count += 1
        heapq.heappush(self._heap, (request.deadline, self._count, request))
        if len(self._heap) > 2 * len(state.requests) + _NUM_STALE:
            self._heap = [entry for entry in self._heap if not entry[2].is_finished]
            heapq.heapify(self._heap)

    def pop_expired(self, now: float) -> list[Request]:
        """Remove and return the requests past their deadline; each is returned once."""
        expired = []
        while self._heap and self._heap[0][0] <= now:
            expired.append(heapq.heappop(self._heap)[2])
        return expired


class DropExpired:
    """First phase of a step: end requests that are waiting or swapped out when their deadline passes.

    Running requests are left to the service, which cancels them by its own clock.
    """

    def __init__(self, deadlines: Deadlines) -> None:
        self._deadlines = deadlines

    def run(self, state: CoreState, draft: StepDraft) -> None:
        """End expired requests that hold no device blocks."""
        for request in self._deadlines.pop_expired(draft.now):
            for group in request.groups:
                if group.place in (QueueKind.WAITING, QueueKind.SWAPPED):
                    draft.ended += state.retire_group(group, SequenceStatus.FINISHED_ABORTED, EXPIRED)


def infeasible(request: Request, needs_s: float, has_s: float) -> DeadlineExceeded:
    """The error for an infeasible deadline, with its numbers."""
    return DeadlineExceeded(
        f"request {request.request_id} needs at least {needs_s:.3f} s and has {max(0.0, has_s):.3f} s until its deadline",
        reason="INFEASIBLE",
        metadata={"needs_s": f"{needs_s:.6f}", "has_s": f"{has_s:.6f}"},
    )
