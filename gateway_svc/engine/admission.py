"""Gateway admission: limits on live requests and their bytes.

Also refuses early what the scheduler's full queue would refuse. Requests and bytes count from when a call is
read until it ends; the room is shared between tenants. Limits on the contents of a single request are in
`checks`.
"""

from dataclasses import dataclass
from types import TracebackType

from gateway_svc.settings import GatewaySettings
from protos.engine.v1 import engine_pb2
from svc_common.clock import NS_PER_S, monotonic_ns
from svc_common.errors import ResourceExhausted
from svc_common.tenant_load import Load, TenantLoad

RETRY_AFTER_S = 1.0
_LEAST_RETRY_S = 0.1


class GatewayCapacity:
    """Room of this gateway for requests to one scheduler. `live`: requests and bytes so far, per tenant, at all schedulers."""

    def __init__(self, settings: GatewaySettings, live: TenantLoad) -> None:
        self._load = live
        self._limit = Load(settings.max_live_requests, settings.max_live_bytes)
        self._closed_for: frozenset[str] = frozenset()
        self._open_at_ns = 0

    @property
    def num_live(self) -> int:
        """Number of admitted calls that have not ended."""
        return self._load.total.num_requests

    @property
    def num_bytes(self) -> int:
        """Total bytes of their request messages."""
        return self._load.total.size

    def hear(self, queue: engine_pb2.QueueState) -> None:
        """Store the scheduler's queue state: the tenants it refuses, and for how long."""
        self._closed_for = frozenset(queue.closed_for)
        self._open_at_ns = monotonic_ns() + queue.retry_after_ns

    def forget(self) -> None:
        """Drop the stored queue state; called when the scheduler cannot be reached."""
        self._closed_for = frozenset()

    def admitted(self, tenant: str, num_bytes: int, *, is_known: bool = False) -> "CapacityLease":
        """Context manager that counts a request while it is entered.

        `is_known`: the scheduler may have the request already, so a full queue does not refuse it.
        """
        return CapacityLease(self, tenant, num_bytes, is_known)

    def take(self, tenant: str, num_bytes: int, *, is_known: bool) -> None:
        """Count a request.

        Raises ResourceExhausted with a retry time if this gateway or the scheduler's queue is full for that
        tenant.
        """
        if not self._load.has_room(tenant, num_bytes, self._limit):
            raise self._gateway_full()
        if tenant in self._closed_for and not is_known:
            raise self._queue_full()
        self._load.enter(tenant, num_bytes)

    def give_back(self, tenant: str, num_bytes: int) -> None:
        """Stop counting a request that ended."""
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


@dataclass(frozen=True, slots=True)
class CapacityLease:
    """Context manager that counts one request; entering it raises as `GatewayCapacity.take` does."""

    capacity: GatewayCapacity
    tenant: str
    num_bytes: int
    is_known: bool = False

    def __enter__(self) -> None:
        self.capacity.take(self.tenant, self.num_bytes, is_known=self.is_known)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.capacity.give_back(self.tenant, self.num_bytes)
