"""Memory without paging: each sequence gets one contiguous region of its maximum length, as before PagedAttention.

The baseline with which paged memory is compared. Regions come from a buddy allocator, so their sizes are powers
of two. Blocks play no part; counts are in slots: one slot holds the KV of one token.
"""

from bisect import insort
from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ContiguousDemand:
    """Memory a request needs before it can start: `num_regions` regions, one per sample, of `max_length` slots each."""

    num_regions: int
    max_length: int


@dataclass(frozen=True, slots=True)
class ContiguousRequest:
    """A request at one instant: its demand, the tokens that each live sequence holds, and their final length.

    `final_length`: prompt and output of the longest sequence at its end; `demand.max_length` where it is not
    known, as in a live system.
    """

    demand: ContiguousDemand
    num_tokens: tuple[int, ...]
    final_length: int


@dataclass(frozen=True, slots=True)
class ContiguousMemory:
    """Slots by use. Every slot that is taken or lost is one of these four:

    - `used`: holds the KV of a token. Prompts are stored once per sequence: nothing is shared.
    - `reserved`: will hold a token of its sequence later (up to `final_length`).
    - `internal`: inside a region and never used: room up to the maximum length, and rounding to a power of two.
    - `external`: outside all regions, but too fragmented for any waiting request (0 if none waits).

    `num_regions` regions are placed; `num_left_out` did not fit, although paged memory holds their sequences.
    """

    used: int
    reserved: int
    internal: int
    external: int
    num_regions: int = 0
    num_left_out: int = 0

    @property
    def num_slots(self) -> int:
        """Slots taken or lost."""
        return self.used + self.reserved + self.internal + self.external

    def shares(self) -> dict[str, float]:
        """The four as fractions of `num_slots`, which add up to 1; all 0 if no slot is taken or lost."""
        return shares(self.used, self.reserved, self.internal, self.external)


def shares(used: int, reserved: int, internal: int, external: int) -> dict[str, float]:
    """Four counts as fractions of their sum, by name; all 0 if the sum is 0."""
    total = used + reserved + internal + external
    counts = {"used": used, "reserved": reserved, "internal": internal, "external": external}
    return {name: count / total if total else 0.0 for name, count in counts.items()}


class BuddyAllocator:
    """Buddy allocator over `num_slots` slots: region sizes are powers of two; a hole merges with its free buddy.

    A memory size that is no power of two starts as several holes, the largest first. Allocation takes the
    smallest hole that fits, lowest address first.
    """

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self._holes: dict[int, list[int]] = {1 << i: [] for i in range(num_slots.bit_length())}
        start = 0
        for size in reversed(self._holes):
            if num_slots & size:
                self._holes[size].append(start)
                start += size

    @staticmethod
    def region_size(num_slots: int) -> int:
        """The smallest power of two that holds `num_slots` (at least 1)."""
        return 1 << max(0, num_slots - 1).bit_length()

    @property
    def num_free(self) -> int:
        """Slots in holes."""
        return sum(size * len(starts) for size, starts in self._holes.items())

    def take(self, size: int) -> int | None:
        """Allocate a region of `size` (a power of two); returns its start, None if no hole is large enough."""
        hole = next((s for s, starts in self._holes.items() if s >= size and starts), None)
        if hole is None:
            return None
        start = self._holes[hole].pop(0)
        while hole > size:
            hole //= 2
            insort(self._holes[hole], start + hole)
        return start

    def give_back(self, start: int, size: int) -> None:
        """Free a region."""
        while (start ^ size) in self._holes.get(size, ()):
            self._holes[size].remove(start ^ size)
            start, size = min(start, start ^ size), size * 2
        insort(self._holes[size], start)


class ContiguousServer:
    """Owner of the regions of requests that start and end, in a memory of `num_slots` slots."""

    def __init__(self, num_slots: int) -> None:
        self._memory = BuddyAllocator(num_slots)
        self._regions: dict[str, list[tuple[int, int]]] = {}

    def enter(self, request_id: str, demand: ContiguousDemand) -> bool:
        """Allocate all regions of a request; returns False, allocating none, if they do not all fit."""
        size, found = BuddyAllocator.region_size(demand.max_length), list[tuple[int, int]]()
        for _ in range(demand.num_regions):
            start = self._memory.take(size)
            if start is None:
                self._give_back(found)
                return False
            found.append((start, size))
        self._regions[request_id] = found
        return True

    def leave(self, request_id: str) -> None:
        """Free the regions of a request."""
        self._give_back(self._regions.pop(request_id))

    def fits(self, demand: ContiguousDemand) -> bool:
        """Whether a request could enter now."""
        if not self.enter("", demand):
            return False
        self.leave("")
        return True

    def report(
        self, tenants: Iterable[ContiguousRequest], waiting: Iterable[ContiguousDemand], num_left_out: int = 0
    ) -> ContiguousMemory:
        """The current state. `tenants`: the requests that hold regions; `waiting`: demands of those that wait."""
        used = reserved = taken = num_regions = 0
        for tenant in tenants:
            region = BuddyAllocator.region_size(tenant.demand.max_length)
            used += sum(tenant.num_tokens)
            reserved += tenant.demand.num_regions * tenant.final_length - sum(tenant.num_tokens)
            taken += tenant.demand.num_regions * region
            num_regions += tenant.demand.num_regions
        wanted = dict.fromkeys(waiting)
        lost = self._memory.num_free if wanted and not any(map(self.fits, wanted)) else 0
        return ContiguousMemory(used, reserved, taken - used - reserved, lost, num_regions, num_left_out)

    def _give_back(self, regions: list[tuple[int, int]]) -> None:
        for start, size in regions:
            self._memory.give_back(start, size)


def place(
    tenants: Iterable[ContiguousRequest], waiting: Iterable[ContiguousDemand], num_slots: int
) -> ContiguousMemory:
    """State of contiguous memory of `num_slots` slots if these requests arrived one by one, in this order.

    Those that do not fit are left out and counted as waiting before `waiting`.
    """
    server, placed, left_out = ContiguousServer(num_slots), [], []
    for i, tenant in enumerate(tenants):
        if server.enter(str(i), tenant.demand):
            placed.append(tenant)
        else:
            left_out.append(tenant.demand)
    return server.report(placed, [*left_out, *waiting], sum(d.num_regions for d in left_out))
