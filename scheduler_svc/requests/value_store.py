"""Values kept in memory for gateways, such as responses that a later request continues.

Gateways keep nothing, so that any of them can answer any request; the scheduler is the one process that all of
them reach. Values are lost with it (docs/decisions/0048-responses-are-kept-by-the-scheduler.md).
"""

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field

from svc_common.clock import NS_PER_S

ENTRY_BYTES = 512
"""Counted for each value besides key and value: about what its objects take."""


@dataclass(slots=True)
class _Values:
    """Values of one tenant, oldest first, with the time at which each expires."""

    entries: OrderedDict[str, tuple[bytes, int]] = field(default_factory=OrderedDict)
    num_bytes: int = 0

    def put(self, key: str, value: bytes, until_ns: int) -> None:
        self.pop(key)
        self.entries[key] = value, until_ns
        self.num_bytes += _size(key, value)

    def pop(self, key: str) -> bool:
        value, _ = self.entries.pop(key, (None, 0))
        if value is not None:
            self.num_bytes -= _size(key, value)
        return value is not None


class ValueStore:
    """Owner of the values: each for `ttl_s`, together at most `max_bytes`. `clock`: monotonic ns.

    When there is no room, the oldest values of the tenant with the most bytes are dropped, so that no tenant can
    displace the values of those that keep less. `num_expired`, `num_displaced`: dropped so far, by cause.
    """

    def __init__(self, max_bytes: int, ttl_s: float, clock: Callable[[], int]) -> None:
        self._max_bytes = max_bytes
        self._ttl_ns = int(ttl_s * NS_PER_S)
        self._clock = clock
        self._tenants: dict[str, _Values] = {}
        self.num_bytes = 0
        self.num_expired = 0
        self.num_displaced = 0

    def __len__(self) -> int:
        return sum(len(values.entries) for values in self._tenants.values())

    def put(self, tenant: str, key: str, value: bytes) -> bool:
        """Keep a value, in place of one of the same key. False: it is larger than all the room, and nothing changed."""
        if _size(key, value) > self._max_bytes:
            return False
        self.expire()
        values = self._tenants.setdefault(tenant, _Values())
        before = values.num_bytes
        values.put(key, value, self._clock() + self._ttl_ns)
        self.num_bytes += values.num_bytes - before
        while self.num_bytes > self._max_bytes:
            self._displace()
        return True

    def get(self, tenant: str, key: str) -> bytes | None:
        """Return a value; None = there is none, or no longer."""
        self.expire()
        values = self._tenants.get(tenant)
        found = values.entries.get(key) if values is not None else None
        return None if found is None else found[0]

    def delete(self, tenant: str, key: str) -> bool:
        """Drop a value. False: there was none."""
        self.expire()
        return tenant in self._tenants and self._drop(tenant, key)

    def expire(self) -> None:
        """Drop what is past its time."""
        now_ns = self._clock()
        for tenant, values in list(self._tenants.items()):
            while values.entries and (oldest := next(iter(values.entries.items())))[1][1] <= now_ns:
                self._drop(tenant, oldest[0])
                self.num_expired += 1

    def _displace(self) -> None:
        tenant = max(self._tenants, key=lambda name: self._tenants[name].num_bytes)
        self._drop(tenant, next(iter(self._tenants[tenant].entries)))
        self.num_displaced += 1

    def _drop(self, tenant: str, key: str) -> bool:
        values = self._tenants[tenant]
        before = values.num_bytes
        was_there = values.pop(key)
        self.num_bytes -= before - values.num_bytes
        if not values.entries:
            del self._tenants[tenant]
        return was_there


def _size(key: str, value: bytes) -> int:
    return len(key) + len(value) + ENTRY_BYTES
