"""The first gate of a gateway: what it holds at a time, and what the scheduler would refuse anyway, refused before any work.

Counted in requests and in bytes, from when a call is read until it is over; each tenant has its share of the room. Limits of what a
single request may say: `checks`.
"""

from types import TracebackType

from gateway_svc.settings import GatewaySettings
from protos.engine.v1 import engine_pb2
from svc_common.clock import NS_PER_S, monotonic_ns
from svc_common.errors import ResourceExhausted
from svc_common.tenant_load import Load, TenantLoad

RETRY_AFTER_S = 1.0
_LEAST_RETRY_S = 0.1


class Admission:
    """Owner of the counts."""

    def __init__(self, settings: GatewaySettings) -> None:
        self._load = TenantLoad()
        self._limit = Load(settings.max_live_requests, settings.max_live_bytes)
        self._closed_for: frozenset[str] = frozenset()
        self._open_at_ns = 0

    @property
    def num_live(self) -> int:
        """Calls with a request, from here to their end."""
        return self._load.total.num_requests

    @property
    def num_bytes(self) -> int:
        """Of their requests."""
        return self._load.total.size

    def hear(self, queue: engine_pb2.QueueState) -> None:
        """What the scheduler says of its queue."""
        self._closed_for = frozenset(queue.closed_for)
        self._open_at_ns = monotonic_ns() + queue.retry_after_ns

    def forget(self) -> None:
        """The scheduler is away: what it said is void."""
        self._closed_for = frozenset()

    def admitted(self, tenant: str, num_bytes: int, *, is_known: bool = False) -> "Place":
        """A request's place while its context lasts. `is_known`: it may be one that the scheduler has already."""
        return Place(self, tenant, num_bytes, is_known=is_known)

    def take(self, tenant: str, num_bytes: int, *, is_known: bool) -> None:
        """Counts a request.

        ResourceExhausted with a retry time where this gateway or the scheduler's queue is full for that tenant.
        """
        if not self._load.has_room(tenant, num_bytes, self._limit):
            raise self._gateway_full()
        if tenant in self._closed_for and not is_known:
            raise self._queue_full()
        self._load.enter(tenant, num_bytes)

    def give_back(self, tenant: str, num_bytes: int) -> None:
        """The request is over."""
        self._load.leave(tenant, num_bytes)

    def _gateway_full(self) -> ResourceExhausted:
        limit = self._limit
        return ResourceExhausted(
            f"this gateway holds {self.num_live} requests of {self.num_bytes} bytes; it takes {limit.num_requests} and "
            f"{limit.size} bytes: try again later, or another gateway",
            reason="GATEWAY_FULL",
            metadata={"live_requests": str(self.num_live), "live_bytes": str(self.num_bytes)},
            retry_after_s=RETRY_AFTER_S,
        )

    def _queue_full(self) -> ResourceExhausted:
        left_s = (self._open_at_ns - monotonic_ns()) / NS_PER_S
        return ResourceExhausted(
            "the scheduler's queue is full: try again later",
            reason="QUEUE_FULL",
            retry_after_s=max(_LEAST_RETRY_S, left_s),
        )


class Place:
    """Context of one request that counts; to enter it may raise as `Admission.take`."""

    __slots__ = ("_admission", "_is_known", "_num_bytes", "_tenant")

    def __init__(self, admission: Admission, tenant: str, num_bytes: int, *, is_known: bool) -> None:
        self._admission = admission
        self._tenant = tenant
        self._num_bytes = num_bytes
        self._is_known = is_known

    def __enter__(self) -> None:
        self._admission.take(self._tenant, self._num_bytes, is_known=self._is_known)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._admission.give_back(self._tenant, self._num_bytes)
