"""Deadlines of accepted requests, by the service's clock: waiting or running, a request ends when its deadline passes.

`LoopIntake.take_ends` ends them between two steps. The core rejects infeasible requests and drops waiting ones
earlier, by its own clock (`core/parts/waiting_deadlines`). The gateway has a timer of its own, for when no
scheduler answers (`gateway_svc/engine/request_table`).
"""

from collections.abc import Callable, Mapping

from scheduler_svc.core.parts.waiting_deadlines import DeadlineHeap
from scheduler_svc.requests.live_request import LiveRequest
from svc_common.errors import DeadlineExceeded


class RequestDeadlines(DeadlineHeap[str]):
    """Core ids by deadline in monotonic ns. `live`: the live requests by core id. `clock`: monotonic ns."""

    def __init__(self, live: Mapping[str, LiveRequest], clock: Callable[[], int]) -> None:
        super().__init__(self._is_past)
        self._live = live
        self._clock = clock

    def take_expired(self) -> list[LiveRequest]:
        """Pop the live requests with an expired deadline."""
        expired = self.pop_expired(self._clock())
        return [self._live[core_id] for core_id in expired] if expired else []

    def _is_past(self, core_id: str, deadline_ns: float) -> bool:
        """True if no live request of that id has that deadline."""
        live = self._live.get(core_id)
        return live is None or live.submission.deadline_ns != deadline_ns


def deadline_passed(*, was_started: bool) -> DeadlineExceeded:
    """The error that a request ends with when its deadline passes."""
    if was_started:
        return DeadlineExceeded("the deadline passed while the request ran", reason="DURING_DECODE")
    return DeadlineExceeded("the deadline passed before the request could be started", reason="EXPIRED_IN_QUEUE")
