"""The address at which the scheduler is called, which may be one of those of a DNS name."""

from collections.abc import Callable

from svc_common.net.names import DNS_SCHEME, AddressDirectory


class SchedulerAddress:
    """Owner of the current address: of `dns:///NAME:PORT` the one in use for as long as NAME has it, then another.

    `every_s`: seconds between two lookups. `on_move` is called on the event loop after a change.
    """

    def __init__(self, scheduler: str, every_s: float) -> None:
        self._directory = AddressDirectory([scheduler], every_s)
        self._directory.on_change = self._follow
        self._current = scheduler.removeprefix(DNS_SCHEME)
        self.on_move: Callable[[], None] = lambda: None

    def current(self) -> str:
        """HOST:PORT; before the first lookup with the name as host."""
        return self._current

    def start(self) -> None:
        """Look the name up from now on, if it is one."""
        self._directory.start()

    async def close(self) -> None:
        """Stop looking it up."""
        await self._directory.close()

    def _follow(self) -> None:
        addresses = self._directory.addresses
        if addresses and self._current not in addresses:
            self._current = addresses[0]
            self.on_move()
