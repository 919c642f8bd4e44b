"""Accounting of the bounded queue: requests and prompt tokens that wait for their first step, by tenant, and the start rate."""

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
    """Rate at which a non-empty queue drains: times at which the queue is empty do not count."""

    def __init__(self, clock: Callable[[], int]) -> None:
        self._clock = clock
        self._starts: deque[int] = deque(maxlen=_NUM_STARTS)
        self._busy_ns = 0
        self._busy_since_ns: int | None = None

    def begin(self) -> None:
        """The queue became non-empty."""
        self._busy_since_ns = self._clock()

    def pause(self) -> None:
        """The queue became empty."""
        self._busy_ns, self._busy_since_ns = self._busy_now_ns, None

    def started(self) -> None:
        """A queued request was started."""
        self._starts.append(self._busy_now_ns)

    @property
    def per_s(self) -> float:
        """Requests per second over the last starts; 0 before there were two."""
        if len(self._starts) < 2:
            return 0.0
        return len(self._starts) / max(1e-3, (self._busy_now_ns - self._starts[0]) / NS_PER_S)

    @property
    def _busy_now_ns(self) -> int:
        since_ns = self._busy_since_ns
        return self._busy_ns if since_ns is None else self._busy_ns + self._clock() - since_ns


class WaitingRoom:
    """Counters of the bounded queue; the requests themselves are the book's. `clock`: monotonic ns.

    The queue is bounded by `max_waiting_requests`, `max_waiting_tokens` (prompt tokens) and, if
    `max_waiting_s` is set, by the number of requests that start within that time. A full queue still accepts
    requests of tenants below their share of it (`TenantLoad`), so that one tenant's flood does not get others
    refused.

    `closed_for`: tenants that were refused and would be refused again; gateways get the list and refuse on
    the scheduler's behalf. Such a tenant always has a request waiting, and each of its requests that stops
    waiting may reopen the queue for it.
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
        """Number of waiting requests."""
        return self._load.total.num_requests

    @property
    def num_tokens(self) -> int:
        """Prompt tokens of the waiting requests."""
        return self._load.total.size

    @property
    def closed_for(self) -> list[str]:
        """Tenants that were refused and for which there is still no room."""
        return list(self._closed)

    def listen(self, listener: Listener) -> None:
        """Call `listener` whenever `closed_for` changes."""
        self._listeners.append(listener)

    # --- entering and leaving -------------------------------------------------------------------------------------

    def enter(self, tenant: str, num_tokens: int) -> None:
        """Count a request with that many prompt tokens as waiting."""
        self._load.enter(tenant, num_tokens)
        if self._load.total.num_requests == 1:
            self._drain.begin()

    def leave(self, tenant: str, num_tokens: int) -> None:
        """Count a request as waiting no more."""
        self._load.leave(tenant, num_tokens)
        if not self._load.total.num_requests:
            self._drain.pause()
        if self._closed:
            self._reopen(tenant)

    def started(self, now_ns: int) -> None:
        """Note that a waiting request was scheduled, for the start rates."""
        self._starts.append(now_ns)
        self._drain.started()

    def check(self, tenant: str, num_tokens: int, now_ns: int) -> None:
        """Raise ResourceExhausted with a retry time if there is no room. A tenant with nothing waiting may queue any prompt."""
        limit = self._limit
        if self._load.has_room(tenant, num_tokens, limit):
            return
        if tenant not in self._closed:
            self._closed[tenant] = None
            self._tell()
        raise ResourceExhausted(
            f"{self.num_requests} requests with {self.num_tokens} prompt tokens are waiting; the queue takes "
            f"{limit.num_requests} requests and {limit.size} tokens: try again later",
            reason="QUEUE_FULL",
            metadata={"waiting_requests": str(self.num_requests), "waiting_tokens": str(self.num_tokens)},
            retry_after_s=self.retry_after_s(now_ns),
        )

    # --- rates ----------------------------------------------------------------------------------------------------

    def starts_per_s(self, now_ns: int) -> float:
        """Requests per second over the last starts, idle times included; 0 before there were two."""
        if len(self._starts) < 2:
            return 0.0
        return len(self._starts) / max(1e-3, (now_ns - self._starts[0]) / NS_PER_S)

    def retry_after_s(self, now_ns: int) -> float:
        """Time until a tenth of the queue has started at the drain rate, in [0.1, 60] s; 1 s while the rate is unknown."""
        rate = self._drain.per_s
        return min(60.0, max(0.1, self.num_requests / 10 / rate)) if rate else 1.0

    # --- inside ---------------------------------------------------------------------------------------------------

    @property
    def _limit(self) -> Load:
        """The configured limits, with fewer requests if fewer start within `max_waiting_s`."""
        most, longest_s = self._settings.max_waiting_requests, self._settings.max_waiting_s
        if longest_s is not None and (rate := self._drain.per_s):
            most = max(1, min(most, int(longest_s * rate)))
        return Load(most, self._settings.max_waiting_tokens)

    def _reopen(self, tenant: str) -> None:
        """After a request of `tenant` left: reopen for all once there is a margin, or for this tenant if it is below its share."""
        limit = self._limit
        limit.num_requests -= limit.num_requests // _MARGIN_PARTS
        limit.size -= limit.size // _MARGIN_PARTS
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
