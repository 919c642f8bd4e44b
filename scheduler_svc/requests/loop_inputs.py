"""What waits for the step loop: requests that are to enter the core, stops and cancels of those that are in it.

The loop takes them between two steps, so that the core never changes while a plan is out.
"""

import asyncio

from scheduler_svc.requests.live_request import LiveRequest
from scheduler_svc.requests.poison_requests import Suspects


class LoopInputs:
    """Owner of the waiting inputs; the book puts them in, `Intake` takes them. `wake`: set when there is something to take.

    A request that is back outside of the core keeps its stops and cancels.
    """

    def __init__(self, wake: asyncio.Event) -> None:
        self._wake = wake
        self._pending: dict[str, LiveRequest] = {}
        self._suspects = Suspects()
        self._stops: dict[tuple[str, int], tuple[LiveRequest, int]] = {}
        self._cancels: dict[str, LiveRequest] = {}

    @property
    def num_pending(self) -> int:
        """Requests that are to enter the core."""
        return len(self._pending)

    # --- put in ---------------------------------------------------------------------------------------------------

    def enter(self, live: LiveRequest) -> None:
        """It is to enter the core, for the first time or again."""
        self._pending[live.core_id] = live

    def stop(self, live: LiveRequest, choice: int, offset: int) -> None:
        """A choice of it is to end after `offset` output tokens."""
        self._stops[live.core_id, choice] = live, offset
        self._wake.set()

    def cancel(self, live: LiveRequest) -> None:
        """It is to end."""
        self._cancels[live.core_id] = live
        self._wake.set()

    def lost(self, live: LiveRequest) -> None:
        """Its worker is gone, which may make it a suspect."""
        self._suspects.lost(live)

    def absolve(self, live: LiveRequest) -> None:
        """No suspect any more; the next one may enter the core."""
        if live.num_losses:
            self._suspects.clear(live)
            self._wake.set()

    def ended(self, live: LiveRequest) -> None:
        """It waits for nothing any more."""
        self._pending.pop(live.core_id, None)
        self._cancels.pop(live.core_id, None)
        self.absolve(live)

    # --- taken ----------------------------------------------------------------------------------------------------

    def take_pending(self) -> list[LiveRequest]:
        """New requests, in order of first arrival, suspects one by one; each is put into the core (`entered`) or failed."""
        taken = self._suspects.may_enter(sorted(self._pending.values(), key=lambda live: live.time.arrival_ns))
        for live in taken:
            del self._pending[live.core_id]
        return taken

    def take_crowd(self) -> list[LiveRequest]:
        """Suspects whose worker was lost and that wait outside of the core for their turn (`back_to_pending`)."""
        return self._suspects.take_crowd()

    def take_stops(self) -> list[tuple[LiveRequest, int, int]]:
        """Choices of requests in the core to stop, with the offset."""
        taken = [(live, choice, offset) for (_, choice), (live, offset) in self._stops.items() if not live.is_over]
        self._stops.clear()
        return taken

    def take_cancels(self) -> list[LiveRequest]:
        """Requests in the core to cancel."""
        taken = list(self._cancels.values())
        self._cancels.clear()
        return taken
