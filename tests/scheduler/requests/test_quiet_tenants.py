"""A tenant that sends less than its share, beside one that floods: never refused, whatever the queue's bound is at the moment."""

import random
from collections import Counter, deque
from collections.abc import Callable

import pytest

from scheduler_svc.requests.waiting_room import WaitingRoom
from scheduler_svc.settings import SchedulerSettings
from svc_common.clock import NS_PER_S
from svc_common.errors import ResourceExhausted

QUIET, FLOOD = "quiet", "flood"
SECONDS = 60.0


class Served:
    """A service in virtual time: so many places, requests of random lengths, tenants that wait take turns.

    A tenant that the room has closed its door to is refused before it asks, as gateways do.
    """

    def __init__(self, seed: int, num_places: int, mean_s: float, **limits: float) -> None:
        self.now_ns = 0
        self.room = WaitingRoom(SchedulerSettings(**limits), lambda: self.now_ns)
        self.refused: Counter[str] = Counter()
        self.asked: Counter[str] = Counter()
        self._draw = random.Random(seed)
        self._mean_s = mean_s
        self._free_at = [0] * num_places
        self._waiting: dict[str, deque[int]] = {QUIET: deque(), FLOOD: deque()}
        self._last = FLOOD

    def run(self, rates: dict[str, float]) -> None:
        """Poisson arrivals of each tenant for `SECONDS`."""
        for at_ns, tenant in sorted(self._arrivals(rates)):
            self._serve_until(at_ns)
            self.now_ns = at_ns
            self._arrive(tenant)
            self._serve_until(at_ns)

    def _arrivals(self, rates: dict[str, float]) -> list[tuple[int, str]]:
        found = []
        for tenant, rate in rates.items():
            at_s = 0.0
            while (at_s := at_s + self._draw.expovariate(rate)) < SECONDS:
                found.append((int(at_s * NS_PER_S), tenant))
        return found

    def _arrive(self, tenant: str) -> None:
        self.asked[tenant] += 1
        try:
            if tenant in self.room.closed_for:
                raise ResourceExhausted("closed", reason="QUEUE_FULL")
            self.room.check(tenant, 32, self.now_ns)
        except ResourceExhausted:
            self.refused[tenant] += 1
            return
        self.room.enter(tenant, 32)
        self._waiting[tenant].append(self.now_ns)

    def _serve_until(self, end_ns: int) -> None:
        """Free places go to the request that is next."""
        while any(self._waiting.values()):
            place = min(range(len(self._free_at)), key=lambda i: self._free_at[i])
            if self._free_at[place] > end_ns:
                return
            self.now_ns = max(self.now_ns, self._free_at[place])
            self._start(place)

    def _start(self, place: int) -> None:
        others = [tenant for tenant in self._waiting if tenant != self._last and self._waiting[tenant]]
        self._last = others[0] if others else self._last
        self._waiting[self._last].popleft()
        self.room.leave(self._last, 32)
        self.room.started(self.now_ns)
        self._free_at[place] = self.now_ns + int(self._draw.expovariate(1 / self._mean_s) * NS_PER_S)


@pytest.mark.parametrize("num_seeds", [2, pytest.param(12, marks=pytest.mark.long)])
@pytest.mark.parametrize("num_places", [4, 16, 64])
def test_a_quiet_tenant_beside_a_flood_is_never_refused(
    num_places: int, num_seeds: int, record_property: Callable[[str, object], None]
) -> None:
    """A tenth of capacity beside three times capacity, a queue bounded by time: the flood alone is refused, and most of it."""
    mean_s = 0.75
    capacity = num_places / mean_s
    for seed in range(num_seeds):
        served = Served(seed, num_places, mean_s, max_waiting_s=2.0)
        served.run({QUIET: 0.1 * capacity, FLOOD: 3 * capacity})
        assert served.asked[QUIET] > 15
        assert served.refused[QUIET] == 0, f"seed {seed}: {served.refused} of {served.asked}"
        assert served.refused[FLOOD] > served.asked[FLOOD] / 4
    record_property("size", f"a quiet tenant beside a flood, {num_places} places: {num_seeds} minutes")
