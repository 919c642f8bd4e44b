"""How much of a bounded room each tenant holds, and which tenant may still take some when it is full.

Counts only: requests, and their size in whatever the room is bounded by beside (tokens, bytes).
"""

from dataclasses import dataclass


@dataclass(slots=True)
class Load:
    """What one tenant holds, or all of them."""

    num_requests: int = 0
    size: int = 0

    def fits(self, size: int, limit: "Load") -> bool:
        """Whether one more request of that size stays within the limit."""
        return self.num_requests < limit.num_requests and self.size + size <= limit.size

    def add(self, num_requests: int, size: int) -> None:
        """So much more, or less."""
        self.num_requests += num_requests
        self.size += size

    def part(self, num_parts: int) -> "Load":
        """One of so many equal parts; at least one request."""
        return Load(max(1, self.num_requests // num_parts), self.size // num_parts)


class TenantLoad:
    """Owner of the counts. `total`: of all tenants.

    A request has room while everything is within the limit, and beyond it while its tenant holds less than its share: the limit
    over the tenants that hold something. So one tenant that fills the room keeps no other out. With T tenants that fill it one
    after the other, the room holds at most 1 + 1/2 + ... + 1/T times its limit; with one tenant, its limit.
    """

    def __init__(self) -> None:
        self.total = Load()
        self._tenants: dict[str, Load] = {}

    def enter(self, tenant: str, size: int) -> None:
        """A tenant holds one request more."""
        self._tenants.setdefault(tenant, Load()).add(1, size)
        self.total.add(1, size)

    def leave(self, tenant: str, size: int) -> None:
        """One of those that entered is gone."""
        own = self._tenants[tenant]
        own.add(-1, -size)
        self.total.add(-1, -size)
        if not own.num_requests:
            del self._tenants[tenant]

    def has_room(self, tenant: str, size: int, limit: Load) -> bool:
        """Whether that tenant may have one more request of that size. One that holds nothing always may, whatever the size."""
        own = self._tenants.get(tenant)
        return own is None or self.total.fits(size, limit) or own.fits(size, limit.part(len(self._tenants)))
