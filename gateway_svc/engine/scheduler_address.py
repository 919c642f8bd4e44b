"""Where a scheduler is called: its address, which may be one of those of a DNS name, and the channel to its AdminService."""

from collections.abc import Callable

import grpc.aio

from svc_common.errors import Unavailable
from svc_common.net.names import DNS_SCHEME, AddressDirectory

_UNSPECIFIED_HOSTS = frozenset({"", "0.0.0.0", "[::]", "::"})


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


class AdminChannel:
    """Owner of the channel to the AdminService of a scheduler.

    `address()`: the address in Welcome, empty while unknown. If the scheduler reports an unspecified host (it
    listens on all interfaces), the host of `scheduler()` is used instead. `connect(address)` returns a channel.
    """

    def __init__(
        self, address: Callable[[], str], scheduler: Callable[[], str], connect: Callable[[str], grpc.aio.Channel]
    ) -> None:
        self._address = address
        self._scheduler = scheduler
        self._connect = connect
        self._channel: grpc.aio.Channel | None = None
        self._connected_to = ""

    async def connected(self) -> grpc.aio.Channel:
        """Return a channel to the scheduler's current address. Raises Unavailable before it was reached."""
        address = self._reachable(self._address())
        if self._channel is None or address != self._connected_to:
            await self.close()
            self._channel, self._connected_to = self._connect(address), address
        return self._channel

    async def close(self) -> None:
        """Close the channel, ending calls in flight."""
        if self._channel is not None:
            await self._channel.close(None)

    def _reachable(self, address: str) -> str:
        if not address:
            raise Unavailable("the scheduler has not been reached yet", reason="SCHEDULER_AWAY", retry_after_s=1.0)
        host, _, port = address.rpartition(":")
        return f"{self._scheduler().rpartition(':')[0]}:{port}" if host in _UNSPECIFIED_HOSTS else address
