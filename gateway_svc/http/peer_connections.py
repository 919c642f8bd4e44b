"""Open connections of each peer address. Pure."""

import ipaddress
from collections import Counter

_IPV6_SITE_BITS = 64


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
