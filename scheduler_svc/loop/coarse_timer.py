"""A reusable coarse timer for waits that need a wake-up at some time at the latest; cheaper than one timer per wait."""

import asyncio
from collections.abc import Callable


class Alarm:
    """At most one pending timer. It may call `ring` earlier than asked, so the waiting code must check and wait again."""

    def __init__(self, ring: Callable[[], None]) -> None:
        self._ring = ring
        self._timer: asyncio.Handle | None = None
        self._at = 0.0  # kept here: for a moment that is there, uvloop's call_at returns a Handle without `when`

    def within(self, seconds: float | None) -> None:
        """Call `ring` in at most that many seconds. No-op for None."""
        if seconds is None:
            return
        loop = asyncio.get_running_loop()
        at = loop.time() + seconds
        if self._timer is not None:
            if self._at <= at:
                return
            self._timer.cancel()
        self._timer, self._at = loop.call_at(at, self._over), at

    def _over(self) -> None:
        self._timer = None
        self._ring()
