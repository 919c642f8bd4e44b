"""Limits of an HTTP listener: time for a request to arrive, header size, connections per peer. Pure.

The body's size is limited in `http_io`, the time that a response may stay unread by the call's deadline.
"""

import ipaddress
from collections import Counter
from dataclasses import dataclass

from svc_common.net.rpc import PUBLIC_METADATA_BYTES

_IPV6_SITE_BITS = 64


@dataclass(frozen=True, slots=True)
class HttpLimits:
    """Limits of one listener.

    `header_s`: from the connection, or the first byte of a further request, to the end of the header (TLS
    handshakes too); `body_s`: from there to the end of the body. `header_bytes`: request line and header
    fields together.
    """

    header_s: float = 10.0
    body_s: float = 60.0
    header_bytes: int = PUBLIC_METADATA_BYTES
    connections_per_peer: int = 1024


class PeerConnections:
    """Counts of open connections by peer address."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._open: Counter[str] = Counter()

    def enter(self, host: str) -> bool:
        """Count one more connection; False, without counting, if the peer has reached its limit."""
        peer = _peer_of(host)
        if self._open[peer] >= self._most:
            return False
        self._open[peer] += 1
        return True

    def leave(self, host: str) -> None:
        """Stop counting a connection that `enter` counted."""
        peer = _peer_of(host)
        self._open[peer] -= 1
        if not self._open[peer]:
            del self._open[peer]


def _peer_of(host: str) -> str:
    """Peer of an address; all addresses of one IPv6 /64, which one machine may own, are one peer."""
    if ":" not in host:
        return host
    address = int(ipaddress.IPv6Address(host.partition("%")[0]))
    return f"{address >> _IPV6_SITE_BITS:x}/{_IPV6_SITE_BITS}"
