"""Queued inputs of the step loop: requests that are to enter the core, and stops and cancels of requests in it.

The loop takes them between steps, so that the core never changes while a plan is in flight.
"""

import asyncio
from operator import attrgetter

from scheduler_svc.requests.live_request import LiveRequest
from scheduler_svc.requests.poison_requests import Suspects


class LoopInputs:
    """Input queues, filled by the book and drained by `LoopIntake`. `wake` is set when there is something to take.

    `has_ends`: there may be stops or cancels.

    Stops and cancels of a request that returns from the core to pending are kept.
    """

    def __init__(self, wake: asyncio.Event) -> None:
        self._wake = wake
        self._pending: dict[str, LiveRequest] = {}
        self.suspects = Suspects()
        self._stops: dict[tuple[str, int], tuple[LiveRequest, int]] = {}
        self._cancels: dict[str, LiveRequest] = {}
        self.has_ends = False

    @property
    def num_pending(self) -> int:
        """Number of requests that are to enter the core."""
        return len(self._pending)

    # --- put in ---------------------------------------------------------------------------------------------------

    def enter(self, live: LiveRequest) -> None:
        """Queue a request for the core, for the first time or again."""
        self._pending[live.core_id] = live

    def stop(self, live: LiveRequest, choice: int, offset: int) -> None:
        """Queue the end of a choice after `offset` output tokens."""
        self._stops[live.core_id, choice] = live, offset
        self.has_ends = True
        self._wake.set()

    def cancel(self, live: LiveRequest) -> None:
        """Queue a request's cancellation."""
        self._cancels[live.core_id] = live
        self.has_ends = True
        self._wake.set()

    def lost(self, live: LiveRequest) -> None:
        """Record that the request's worker was lost, which may make it a suspect (`poison_requests`)."""
        self.suspects.lost(live)

    def absolve(self, live: LiveRequest) -> None:
        """Clear the request's losses and suspicion, so that the next suspect may enter the core."""
        if live.num_losses:
            self.suspects.clear(live)
            self._wake.set()

    def ended(self, live: LiveRequest) -> None:
        """Remove the ended request's queued inputs, except stops, which `take_stops` skips."""
        self._pending.pop(live.core_id, None)
        self._cancels.pop(live.core_id, None)
        self.absolve(live)

    # --- taken ----------------------------------------------------------------------------------------------------

    def take_pending(self) -> list[LiveRequest]:
        """Pop pending requests in order of arrival, at most one suspect; the caller must call `entered` or `fail` for each."""
        if not self._pending:
            return []
        taken = self.suspects.may_enter(sorted(self._pending.values(), key=attrgetter("time.arrival_ns")))
        for live in taken:
            del self._pending[live.core_id]
        return taken

    def take_stops(self) -> list[tuple[LiveRequest, int, int]]:
        """Pop queued stops of live requests as (request, choice, offset)."""
        taken = [(live, choice, offset) for (_, choice), (live, offset) in self._stops.items() if not live.is_over]
        self._stops.clear()
        return taken

    def take_cancels(self) -> list[LiveRequest]:
        """Pop queued cancels. The caller took the stops before."""
        taken = list(self._cancels.values())
        self._cancels.clear()
        self.has_ends = False
        return taken
