"""A timer for who waits for an event and must look up now and then: set anew for each wait it would cost more than the wait."""

import asyncio
from collections.abc import Callable


class Alarm:
    """Owner of one timer at most. `ring()`: what it does; maybe earlier than asked, so that whoever waits looks and waits on."""

    def __init__(self, ring: Callable[[], None]) -> None:
        self._ring = ring
        self._timer: asyncio.TimerHandle | None = None

    def within(self, seconds: float | None) -> None:
        """Rings in so many seconds at the latest; None = need not."""
        if seconds is None:
            return
        loop = asyncio.get_running_loop()
        at = loop.time() + seconds
        if self._timer is not None and self._timer.when() > at:
            self._timer.cancel()
            self._timer = None
        self._timer = self._timer or loop.call_at(at, self._over)

    def _over(self) -> None:
        self._timer = None
        self._ring()
