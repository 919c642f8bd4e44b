"""How the stages of a group connect: ranks behind the first stage listen, and say where by way of rank 0."""

import socket
import struct
import time
from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum

from paged_kernels.ranks import PeerLost
from svc_common.errors import PermissionDenied
from svc_common.net import peer_sockets
from svc_common.net.tls_settings import WORKER, PeerSettings
from worker_svc.ranks.channel import Channel, MessageKind
from worker_svc.ranks.links import StageLinks

_HELLO = struct.Struct("<IB")
_JOIN_S = 60.0
_HELLO_S = 5.0


class _Use(IntEnum):
    STATES = 1
    TOKENS = 2


@dataclass(frozen=True, slots=True)
class Linking:
    """What a rank needs to connect. `host`: its own address, as other ranks reach it. `exchange`: see RankPlace."""

    rank: int
    tensor_size: int
    num_stages: int
    host: str
    peers: PeerSettings
    exchange: Callable[[bytes], list[bytes]]

    def links(self, timeout_s: float) -> StageLinks:
        """Connect. All ranks call it. Raises PeerLost."""
        size, last = self.tensor_size, (self.num_stages - 1) * self.tensor_size
        listener = None if self.rank < size else _Listener(self.host, self.peers)
        addresses = [
            address.decode() for address in self.exchange(b"" if listener is None else listener.address.encode())
        ]
        after = None if self.rank >= last else self._connected(addresses, self.rank + size, _Use.STATES)
        tokens = None if self.rank else self._connected(addresses, last, _Use.TOKENS)
        wanted = {(self.rank - size, _Use.STATES)} | ({(0, _Use.TOKENS)} if self.rank == last else set())
        found = {} if listener is None else listener.accepted(wanted)
        before = found.get((self.rank - size, _Use.STATES))
        return StageLinks(before, after, tokens or found.get((0, _Use.TOKENS)), timeout_s=timeout_s)

    def _connected(self, addresses: list[str], to: int, use: _Use) -> Channel:
        host, _, port = addresses[to].rpartition(":")
        try:
            connection = socket.create_connection((host, int(port)), timeout=_JOIN_S)
            channel = Channel(peer_sockets.connected(self.peers, connection, WORKER, host), f"rank {to}")
        except OSError as error:
            raise PeerLost(f"rank {to} at {addresses[to]} cannot be reached: {error}") from error
        channel.send(MessageKind.LINK, _HELLO.pack(self.rank, use))
        return channel


class _Listener:
    """Where ranks of other stages connect. Closes when they have."""

    def __init__(self, host: str, peers: PeerSettings) -> None:
        self._peers = peers
        self._socket = socket.create_server((host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
        self.address = f"{host}:{self._socket.getsockname()[1]}"

    def accepted(self, wanted: set[tuple[int, _Use]]) -> dict[tuple[int, _Use], Channel]:
        """A connection of each rank for each use. Raises PeerLost if one does not connect in time."""
        found: dict[tuple[int, _Use], Channel] = {}
        deadline = time.monotonic() + _JOIN_S
        with self._socket:
            while missing := wanted - found.keys():
                self._socket.settimeout(max(0.001, deadline - time.monotonic()))
                try:
                    connection, _ = self._socket.accept()
                except OSError as error:
                    raise PeerLost(f"rank {min(missing)[0]} does not connect: {error}") from error
                joined = self._joined(connection)
                if joined is not None and joined[0] in missing:
                    found[joined[0]] = joined[1]
        return found

    def _joined(self, connection: socket.socket) -> tuple[tuple[int, _Use], Channel] | None:
        """What a connection is for; None for a stranger's."""
        try:
            connection.settimeout(_HELLO_S)
            channel = Channel(peer_sockets.accepted(self._peers, connection, WORKER), "a rank")
            rank, use = _HELLO.unpack(channel.expect(MessageKind.LINK, _HELLO_S))
            channel.peer = f"rank {rank}"
            return (rank, _Use(use)), channel
        except (OSError, PermissionDenied, PeerLost, struct.error, ValueError):
            connection.close()
            return None
