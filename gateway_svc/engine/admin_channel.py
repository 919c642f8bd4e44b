"""Channel to the AdminService of a scheduler, whose address the scheduler's Welcome has."""

from collections.abc import Callable

import grpc.aio

from svc_common.errors import Unavailable

_UNSPECIFIED_HOSTS = frozenset({"", "0.0.0.0", "[::]", "::"})


class AdminChannel:
    """Owner of the channel.

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
