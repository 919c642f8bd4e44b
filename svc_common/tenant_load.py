"""Shares of a bounded room between tenants, and admission when it is full.

Counts requests and their size, in the second unit that bounds the room (tokens, bytes).
"""

from dataclasses import dataclass


@dataclass(slots=True)
class Load:
    """Requests and size held by one tenant, or by all."""

    num_requests: int = 0
    size: int = 0

    def fits(self, size: int, limit: "Load") -> bool:
        """True if one more request of that size stays within the limit."""
        return self.num_requests < limit.num_requests and self.size + size <= limit.size

    def part(self, num_parts: int) -> "Load":
        """One of so many equal parts, with at least one request."""
        return Load(max(1, self.num_requests // num_parts), self.size // num_parts)


class TenantLoad:
    """Load per tenant. `total`: of all tenants.

    A request has room while the total is within the limit, and beyond it while its tenant holds less than its
    share: the limit divided by the number of tenants that hold something. So a tenant that fills the room
    does not lock others out. If T tenants fill it one after the other, the room holds at most 1 + 1/2 + ... +
    1/T times its limit; with one tenant, its limit.
    """

    def __init__(self) -> None:
        self.total = Load()
        self._tenants: dict[str, Load] = {}

    def enter(self, tenant: str, size: int) -> None:
        """Add one request to a tenant's load."""
        for load in (self._tenants.setdefault(tenant, Load()), self.total):
            load.num_requests += 1
            load.size += size

    def leave(self, tenant: str, size: int) -> None:
        """Remove one request that was added."""
        for load in (self._tenants[tenant], self.total):
            load.num_requests -= 1
            load.size -= size
        if not self._tenants[tenant].num_requests:
            del self._tenants[tenant]

    def has_room(self, tenant: str, size: int, limit: Load) -> bool:
        """True if that tenant may add a request of that size. A tenant that holds nothing always may, at any size."""
        own = self._tenants.get(tenant)
        return own is None or self.total.fits(size, limit) or own.fits(size, limit.part(len(self._tenants)))
