"""Addresses behind DNS names, which are looked up again and again.

`dns:///NAME:PORT` stands for all addresses of NAME, as of a headless Kubernetes service. A name that cannot be resolved at the
moment keeps the addresses that it had.
"""

import asyncio
import logging
import socket
from collections.abc import Callable, Iterable

log = logging.getLogger(__name__)

DNS_SCHEME = "dns:///"
"""Before a name that stands for its addresses."""


class AddressDirectory:
    """Owner of the current addresses, in order: given ones, then those of each name, sorted.

    `every_s`: seconds between two lookups. `on_change` is called on the event loop after a change.
    """

    def __init__(self, addresses: Iterable[str], every_s: float) -> None:
        given = tuple(addresses)
        self._fixed = [address for address in given if not address.startswith(DNS_SCHEME)]
        self._found = {name: list[str]() for name in given if name.startswith(DNS_SCHEME)}
        self._every_s = every_s
        self._task: asyncio.Task[None] | None = None
        self.on_change: Callable[[], None] = lambda: None

    @property
    def addresses(self) -> list[str]:
        """The addresses as of the last lookup, each once."""
        return list(dict.fromkeys([*self._fixed, *(address for found in self._found.values() for address in found)]))

    def start(self) -> None:
        """Look the names up from now on, if there are any."""
        if self._found:
            self._task = asyncio.create_task(self._keep_looking(), name="dns-lookup")

    async def close(self) -> None:
        """Stop looking names up."""
        if self._task is not None:
            self._task.cancel()

    async def _keep_looking(self) -> None:
        while True:
            before = self.addresses
            await asyncio.gather(*map(self._look_up, self._found))
            if self.addresses != before:
                log.info("%s: now at %s", ", ".join(self._found), ", ".join(self.addresses) or "no address")
                self.on_change()
            await asyncio.sleep(self._every_s)

    async def _look_up(self, name: str) -> None:
        host, _, port = name.removeprefix(DNS_SCHEME).rpartition(":")
        try:
            answers = await asyncio.get_running_loop().getaddrinfo(host, int(port), type=socket.SOCK_STREAM)
        except OSError as error:
            log.warning("%s cannot be resolved, and keeps its addresses: %s", name, error)
            return
        self._found[name] = sorted({_written(*answer[4][:2]) for answer in answers})


def _written(host: str | int, port: str | int) -> str:
    """HOST:PORT, an IPv6 address in brackets."""
    return f"[{host}]:{port}" if ":" in str(host) else f"{host}:{port}"
