"""Addresses of a name in this process, in place of a DNS server: for tests of what follows a change."""

import asyncio
import socket
from typing import Any

import pytest


class Names:
    """Addresses by name, in place of a DNS server; None: the name cannot be resolved."""

    def __init__(self, name: str) -> None:
        self.addresses: list[str] | None = []
        self._name = name

    async def getaddrinfo(self, host: str, port: int, **_options: Any) -> list[Any]:
        """As `loop.getaddrinfo`."""
        assert host == self._name
        if self.addresses is None:
            raise socket.gaierror("no answer")
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, port)) for address in self.addresses]


def resolving(name: str, monkeypatch: pytest.MonkeyPatch) -> Names:
    """What `name` resolves to from now on."""
    found = Names(name)
    monkeypatch.setattr(asyncio.BaseEventLoop, "getaddrinfo", found.getaddrinfo)
    return found
