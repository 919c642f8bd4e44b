"""Limits of an HTTP listener: how long a request may take to arrive, its header's size, connections of one peer. Pure.

The bound of a body is `http_io`'s; how long an answer may stay unread is the call's own limit.
"""

import ipaddress
from collections import Counter
from dataclasses import dataclass

from svc_common.rpc import PUBLIC_METADATA_BYTES

_IPV6_SITE_BITS = 64


@dataclass(frozen=True, slots=True)
class HttpLimits:
    """`header_s`: from a connection or the first byte of a further request to the end of its header (TLS handshakes too);
    `body_s`: from there to the end of its body. `header_bytes`: request line and header fields together."""

    header_s: float = 10.0
    body_s: float = 60.0
    header_bytes: int = PUBLIC_METADATA_BYTES
    connections_per_peer: int = 1024


class PeerConnections:
    """Open connections by peer address. Owner of the counts."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._open: Counter[str] = Counter()

    def enter(self, host: str) -> bool:
        """Count one more connection; False, and nothing counted, where the peer has as many as it may."""
        peer = _peer_of(host)
        if self._open[peer] >= self._most:
            return False
        self._open[peer] += 1
        return True

    def leave(self, host: str) -> None:
        """One that `enter` counted has ended."""
        peer = _peer_of(host)
        self._open[peer] -= 1
        if not self._open[peer]:
            del self._open[peer]


def _peer_of(host: str) -> str:
    """Addresses of one IPv6 site (a /64, which one machine may have whole) are one peer."""
    if ":" not in host:
        return host
    address = int(ipaddress.IPv6Address(host.partition("%")[0]))
    return f"{address >> _IPV6_SITE_BITS:x}/{_IPV6_SITE_BITS}"
