"""The bounded queue's account: how many requests and prompt tokens wait for their first step, whose, and how fast they start."""

from collections import deque
from collections.abc import Callable

from scheduler_svc.settings import SchedulerSettings
from svc_common.clock import NS_PER_S
from svc_common.errors import ResourceExhausted
from svc_common.tenant_load import Load, TenantLoad

_MARGIN_PARTS = 64
_NUM_STARTS = 64

Listener = Callable[[], None]


class DrainRate:
    """How fast a queue that is not empty gets shorter from its front: idle times do not count. Owner of its own clock."""

    def __init__(self, clock: Callable[[], int]) -> None:
        self._clock = clock
        self._starts: deque[int] = deque(maxlen=_NUM_STARTS)
        self._busy_ns = 0
        self._busy_since_ns: int | None = None

    def begin(self) -> None:
        """Somebody waits."""
        self._busy_since_ns = self._clock()

    def pause(self) -> None:
        """Nobody does any more."""
        self._busy_ns, self._busy_since_ns = self._busy_now_ns, None

    def started(self) -> None:
        """One of them waits no more, as it has begun."""
        self._starts.append(self._busy_now_ns)

    @property
    def per_s(self) -> float:
        """Rate of the last starts; 0 before there were two."""
        if len(self._starts) < 2:
            return 0.0
        return len(self._starts) / max(1e-3, (self._busy_now_ns - self._starts[0]) / NS_PER_S)

    @property
    def _busy_now_ns(self) -> int:
        since_ns = self._busy_since_ns
        return self._busy_ns if since_ns is None else self._busy_ns + self._clock() - since_ns


class WaitingRoom:
    """Counts only; the requests themselves are the book's. Bounded by number and by prompt tokens, and, where the operator says how
    long a request may wait, by as many as start in that time (`settings`). `clock`: monotonic ns.

    A full queue still takes requests of tenants that hold less than their share of it (`TenantLoad`), so that a flood is refused
    and its neighbours are not. `closed_for`: tenants that were refused and would be again; gateways are told, and refuse for it.
    Such a tenant always has a request waiting, and each of its requests that stops waiting may open the queue for it.
    """

    def __init__(self, settings: SchedulerSettings, clock: Callable[[], int]) -> None:
        self._settings = settings
        self._drain = DrainRate(clock)
        self._load = TenantLoad()
        self._closed: dict[str, None] = {}
        self._starts: deque[int] = deque(maxlen=_NUM_STARTS)
        self._listeners: list[Listener] = []

    @property
    def num_requests(self) -> int:
        """Requests that wait."""
        return self._load.total.num_requests

    @property
    def num_tokens(self) -> int:
        """Their prompt tokens."""
        return self._load.total.size

    @property
    def closed_for(self) -> list[str]:
        """Tenants for whom there is no room now, as far as they tried."""
        return list(self._closed)

    def listen(self, listener: Listener) -> None:
        """Calls it whenever `closed_for` has changed."""
        self._listeners.append(listener)

    # --- who comes and goes ---------------------------------------------------------------------------------------

    def enter(self, tenant: str, num_tokens: int) -> None:
        """A request with that many prompt tokens waits."""
        self._load.enter(tenant, num_tokens)
        if self.num_requests == 1:
            self._drain.begin()

    def leave(self, tenant: str, num_tokens: int) -> None:
        """It waits no more."""
        self._load.leave(tenant, num_tokens)
        if not self.num_requests:
            self._drain.pause()
        if self._closed:
            self._reopen(tenant)

    def started(self, now_ns: int) -> None:
        """One was scheduled: what the rate is measured by."""
        self._starts.append(now_ns)
        self._drain.started()

    def check(self, tenant: str, num_tokens: int, now_ns: int) -> None:
        """ResourceExhausted with a retry time unless there is room. A tenant that has nothing waiting finds room for any prompt."""
        if self._load.has_room(tenant, num_tokens, self._limit):
            return
        if tenant not in self._closed:
            self._closed[tenant] = None
            self._tell()
        limits = self._settings
        raise ResourceExhausted(
            f"{self.num_requests} requests with {self.num_tokens} prompt tokens are waiting; the queue takes "
            f"{self._most_requests} requests and {limits.max_waiting_tokens} tokens: try again later",
            reason="QUEUE_FULL",
            metadata={"waiting_requests": str(self.num_requests), "waiting_tokens": str(self.num_tokens)},
            retry_after_s=self.retry_after_s(now_ns),
        )

    # --- how fast it goes -----------------------------------------------------------------------------------------

    def starts_per_s(self, now_ns: int) -> float:
        """Rate of the last starts; 0 before there were two."""
        if len(self._starts) < 2:
            return 0.0
        return len(self._starts) / max(1e-3, (now_ns - self._starts[0]) / NS_PER_S)

    def retry_after_s(self, now_ns: int) -> float:
        """Time for a tenth of the queue to start, at the rate at which it drains; between 0.1 and 60 s."""
        rate = self._drain.per_s
        return min(60.0, max(0.1, self.num_requests / 10 / rate)) if rate else 1.0

    # --- inside ---------------------------------------------------------------------------------------------------

    @property
    def _most_requests(self) -> int:
        """As many as may wait, or as start in the time that they may."""
        most, longest_s, rate = self._settings.max_waiting_requests, self._settings.max_waiting_s, self._drain.per_s
        if longest_s is None or not rate:
            return most
        return max(1, min(most, int(longest_s * rate)))

    @property
    def _limit(self) -> Load:
        return Load(self._most_requests, self._settings.max_waiting_tokens)

    def _reopen(self, tenant: str) -> None:
        """One of that tenant's left: once there is a little room all may try again, or it alone where it is below its share."""
        limit = self._limit
        limit.add(-(limit.num_requests // _MARGIN_PARTS), -(limit.size // _MARGIN_PARTS))
        if self._load.total.fits(1, limit):
            self._closed.clear()
        elif tenant in self._closed and self._load.has_room(tenant, 1, limit):
            del self._closed[tenant]
        else:
            return
        self._tell()

    def _tell(self) -> None:
        for listener in self._listeners:
            listener()
