"""A DNS server for a few names with changing addresses, and a network namespace in which it is the system's resolver.

Programs in it use the real path: resolv.conf, the C library or gRPC's own resolver, UDP to port 53.
"""

import asyncio
import contextlib
import socket
import struct
import subprocess
import sys
from collections import Counter
from collections.abc import AsyncIterator
from typing import Any

import pytest

HOST = "127.0.0.53"
_INSIDE = """ip link set lo up
mkdir -p /tmp/quire-dns && mount -t tmpfs none /tmp/quire-dns
printf 'nameserver {host}\\noptions timeout:1 attempts:2\\n' > /tmp/quire-dns/resolv.conf
mount --bind /tmp/quire-dns/resolv.conf /etc/resolv.conf
exec "$0" "$@"
"""
_UNSHARE = ("unshare", "--user", "--map-root-user", "--mount", "--net")
_HEADER = struct.Struct("!6H")
_A, _IN, _TTL_S = 1, 1, 0
_ANSWER, _NO_SUCH_NAME = 0x8580, 0x8583


def run_inside(module: str, *arguments: str, timeout_s: float) -> str:
    """Output of `python -m MODULE ARGUMENTS` in such a namespace. Skips the test where the system allows none."""
    allowed = subprocess.run([*_UNSHARE, "ip", "link", "set", "lo", "up"], capture_output=True, timeout=60, check=False)
    if allowed.returncode:
        pytest.skip(f"needs a network namespace: {allowed.stderr.decode(errors='replace').strip()}")
    command = [*_UNSHARE, "sh", "-ec", _INSIDE.format(host=HOST), sys.executable, "-m", module, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, check=False)
    assert done.returncode == 0, done.stdout[-2_000:] + done.stderr[-6_000:]
    return done.stdout


class Zone(asyncio.DatagramProtocol):
    """Owner of the addresses by name. `answers`: for each name, how many A queries were answered."""

    def __init__(self) -> None:
        self.addresses: dict[str, list[str]] = {}
        self.answers: Counter[str] = Counter()

    def connection_made(self, transport: Any) -> None:
        self._transport: asyncio.DatagramTransport = transport

    def datagram_received(self, data: bytes, addr: tuple[str, int]) -> None:
        number, _, _, _, _, _ = _HEADER.unpack_from(data)
        labels, at = [], _HEADER.size
        while data[at]:
            labels.append(data[at + 1 : at + 1 + data[at]].decode())
            at += 1 + data[at]
        question, (kind, _) = data[_HEADER.size : at + 5], struct.unpack_from("!2H", data, at + 1)
        name = ".".join(labels).lower()
        found = self.addresses.get(name)
        records = [self._record(address) for address in found or ()] if kind == _A else []
        flags = _NO_SUCH_NAME if found is None else _ANSWER
        self._transport.sendto(_HEADER.pack(number, flags, 1, len(records), 0, 0) + question + b"".join(records), addr)
        self.answers[name] += kind == _A

    def _record(self, address: str) -> bytes:
        # 0xC00C: the name is that of the question.
        return struct.pack("!HHHIH", 0xC00C, _A, _IN, _TTL_S, 4) + socket.inet_aton(address)


@contextlib.asynccontextmanager
async def serving() -> AsyncIterator[Zone]:
    """The server, at the address in resolv.conf."""
    transport, zone = await asyncio.get_running_loop().create_datagram_endpoint(Zone, local_addr=(HOST, 53))
    try:
        yield zone
    finally:
        transport.close()
