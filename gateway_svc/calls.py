"""Calls from outside through either API: caller, request id, deadline. Both APIs make them with `CallIntake`."""

import asyncio
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from types import TracebackType
from typing import Protocol

from opentelemetry.trace import Span

from gateway_svc.request_ids import accept_request_id
from gateway_svc.requests.engine_request import EngineRequest
from gateway_svc.settings import GatewaySettings
from protos.engine.v1 import engine_pb2
from protos.inference.v1 import inference_pb2
from svc_common.clock import NS_PER_S, monotonic_ns
from svc_common.observability import log_context
from svc_common.observability.log_context import LogContext

DEADLINE_MARGIN_S = 0.05


class Permit(Protocol):
    """Permission to run requests for one call, until its context ends; on exit, charged but unused quota is returned."""

    def charge(self, submit: engine_pb2.Submit) -> None:
        """Charge the request's maximum cost and set its caller's cache salt. Raises ResourceExhausted."""

    def settle(self, request: EngineRequest) -> None:
        """Settle a charged request that is over or has lost its reader here. Call once for each."""


class Terms(Protocol):
    """Limits and permissions of a caller."""

    def count_call(self) -> None:
        """Count one call of any kind. Raises ResourceExhausted."""

    def may_use(self, model: str) -> bool:
        """True if the caller may use the model or adapter."""

    def check_model(self, model: str) -> None:
        """Raise PermissionDenied if the caller may not use it."""

    def permit(self, priority: int) -> AbstractContextManager[Permit]:
        """Return the permit for a call, before any work on it.

        Raises PermissionDenied for a higher priority (= sooner) than allowed, and ResourceExhausted.
        """


class FreePermit:
    """Permit that allows everything and counts nothing; one instance serves all calls."""

    def __enter__(self) -> Permit:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """No-op."""

    def charge(self, submit: engine_pb2.Submit) -> None:
        """No-op."""

    def settle(self, request: EngineRequest) -> None:
        """No-op."""


class FreeTerms:
    """Terms of the default tenant: no limits, one cache for all callers."""

    def __init__(self) -> None:
        self._permit = FreePermit()

    def count_call(self) -> None:
        """No-op."""

    def may_use(self, model: str) -> bool:
        """True for every model."""
        return True

    def check_model(self, model: str) -> None:
        """No-op."""

    def permit(self, priority: int) -> AbstractContextManager[Permit]:
        """Return the free permit."""
        return self._permit


class ClientGone(Exception):
    """The client closed the connection, so no answer can be delivered."""


@dataclass(frozen=True, slots=True)
class Caller:
    """A caller with its terms. `tenant`: empty = the default one. `is_admin`: may use the admin API."""

    tenant: str = ""
    terms: Terms = field(default_factory=FreeTerms)
    is_admin: bool = False


@dataclass(frozen=True, slots=True)
class ServiceGoals:
    """What a router in front wants of a request: priority (higher = sooner), and times in seconds, from `since_ns` on.

    None = it does not say.
    """

    priority: int | None = None
    ttft_s: float | None = None
    tpot_s: float | None = None
    since_ns: int = 0

    def put_priority(self, scheduling: inference_pb2.Scheduling) -> None:
        """Replace a request's own priority."""
        if self.priority is not None:
            scheduling.priority = self.priority

    def deadline_ns(self, num_tokens: int) -> int | None:
        """When an output of that many tokens is due: time to the first, and that of each further one. None if unknown."""
        per_token_s = 0.0 if num_tokens <= 1 else self.tpot_s
        if self.ttft_s is None or per_token_s is None:
            return None
        return self.since_ns + int((self.ttft_s + per_token_s * (num_tokens - 1)) * NS_PER_S)


@dataclass(frozen=True, slots=True)
class Call:
    """One call.

    `deadline_ns`: on this process's monotonic clock. `idempotent`: a call with the same id attaches to its
    request. `is_named`: the client chose the request id. `goals`: of a trusted router, for each request of the call.
    """

    request_id: str
    deadline_ns: int
    span: Span
    stream: bool
    caller: Caller = Caller()
    idempotent: bool = False
    is_named: bool = False
    goals: ServiceGoals = ServiceGoals()

    def deadline_of(self, max_tokens: int) -> int:
        """Deadline of a request with that many output tokens at most: the call's, or when the router wants it done."""
        due_ns = self.goals.deadline_ns(max_tokens)
        return self.deadline_ns if due_ns is None else min(self.deadline_ns, due_ns)

    @property
    def remaining_s(self) -> float:
        """Seconds until the deadline."""
        return (self.deadline_ns - monotonic_ns()) / NS_PER_S


Goals = Callable[[Mapping[str, str]], ServiceGoals]


class Callers(Protocol):
    """Identifies callers."""

    def of(self, metadata: Mapping[str, str]) -> Caller:
        """Identify the caller from a call's metadata or HTTP headers (names in lower case).

        Raises Unauthenticated or PermissionDenied.
        """

    async def run(self) -> None:
        """Keep the known callers up to date, until cancelled."""

    def reload(self) -> None:
        """Reload the known callers now."""


class DefaultTenantOnly:
    """Callers when no keys are configured: every caller is the default tenant and an administrator.

    `x-tenant-id` is ignored, since nothing authenticates it.
    """

    def __init__(self) -> None:
        self._caller = Caller(is_admin=True)

    def of(self, metadata: Mapping[str, str]) -> Caller:
        """Return the default tenant."""
        return self._caller

    async def run(self) -> None:
        """Wait until cancelled."""
        await asyncio.Event().wait()

    def reload(self) -> None:
        """No-op."""


class CallIntake:
    """Makes the `Call` of each call from its metadata. `goals(metadata)`: those of a trusted router."""

    def __init__(
        self, settings: GatewaySettings, callers: Callers, goals: Goals = lambda metadata: ServiceGoals()
    ) -> None:
        self._settings = settings
        self._callers = callers
        self._goals = goals

    def accept(self, metadata: Mapping[str, str], remaining_s: float | None, span: Span, *, stream: bool) -> Call:
        """Make the call and set the log context of the running task to it.

        `remaining_s`: to the client's deadline, None = none. Raises Unauthenticated, PermissionDenied, or
        InvalidArgument for a malformed id.
        """
        caller = self._callers.of(metadata)
        key = metadata.get("idempotency-key")
        # The key has precedence: proxies give each call, also a retry, a new x-request-id.
        request_id = (
            accept_request_id(key, "idempotency-key") if key else accept_request_id(metadata.get("x-request-id"))
        )
        log_context.enter(LogContext.of(request_id=request_id, tenant=caller.tenant, span=span))
        return Call(
            request_id,
            self._deadline_after(remaining_s),
            span,
            stream,
            caller,
            idempotent=bool(key),
            is_named=bool(key or metadata.get("x-request-id")),
            goals=self._goals(metadata),
        )

    def _deadline_after(self, remaining_s: float | None) -> int:
        """Deadline slightly before the client's, so that the client gets our error and not the transport's."""
        if remaining_s is None or remaining_s > self._settings.max_request_s:
            return monotonic_ns() + int(self._settings.max_request_s * NS_PER_S)
        margin_s = min(DEADLINE_MARGIN_S, 0.2 * remaining_s)
        return monotonic_ns() + int((remaining_s - margin_s) * NS_PER_S)
