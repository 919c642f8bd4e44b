"""Calls from outside, whichever door they come through: who calls, under which id, until when. Both make them by `CallIntake`."""

import asyncio
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from types import TracebackType
from typing import Protocol

from opentelemetry.trace import Span

from gateway_svc.engine.engine_request import EngineRequest
from gateway_svc.request_ids import accept_request_id
from gateway_svc.settings import GatewaySettings
from protos.engine.v1 import engine_pb2
from svc_common import log_context
from svc_common.clock import NS_PER_S, monotonic_ns
from svc_common.log_context import LogContext

DEADLINE_MARGIN_S = 0.05


class Permit(Protocol):
    """A call's leave to run requests, until its context ends; then what they cost less than was charged is given back."""

    def charge(self, submit: engine_pb2.Submit) -> None:
        """Takes what the request may cost at most and gives it its caller's cache salt. ResourceExhausted."""

    def settle(self, request: EngineRequest) -> None:
        """A request that was charged is over, or nobody here reads it any more; to be called once for each."""


class Terms(Protocol):
    """On which terms a caller is served."""

    def count_call(self) -> None:
        """One call more, whatever it asks for. ResourceExhausted."""

    def may_use(self, model: str) -> bool:
        """Whether the model or adapter is there for the caller."""

    def check_model(self, model: str) -> None:
        """PermissionDenied for one that is not."""

    def permit(self, priority: int) -> AbstractContextManager[Permit]:
        """Before any work on a request. PermissionDenied for a higher priority (= sooner) than allowed, ResourceExhausted."""


class FreePermit:
    """Everything is allowed and nothing counted; the same one for all calls."""

    def __enter__(self) -> Permit:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Nothing to give back."""

    def charge(self, submit: engine_pb2.Submit) -> None:
        """See Permit."""

    def settle(self, request: EngineRequest) -> None:
        """See Permit."""


class FreeTerms:
    """Those of the default tenant: no limits, one cache for all."""

    def __init__(self) -> None:
        self._permit = FreePermit()

    def count_call(self) -> None:
        """See Terms."""

    def may_use(self, model: str) -> bool:
        """See Terms."""
        return True

    def check_model(self, model: str) -> None:
        """See Terms."""

    def permit(self, priority: int) -> AbstractContextManager[Permit]:
        """See Terms."""
        return self._permit


class ClientGone(Exception):
    """The client closed the connection; nobody is left to answer."""


@dataclass(frozen=True, slots=True)
class Caller:
    """Who calls, on which terms. `tenant`: empty = the default one. `is_admin`: may use the operators' API."""

    tenant: str = ""
    terms: Terms = field(default_factory=FreeTerms)
    is_admin: bool = False


@dataclass(frozen=True, slots=True)
class Call:
    """One call. `deadline_ns`: on this process' monotonic clock. `idempotent`: a call with the same id attaches to its request."""

    request_id: str
    deadline_ns: int
    span: Span
    stream: bool
    caller: Caller = Caller()
    idempotent: bool = False

    @property
    def remaining_s(self) -> float:
        """Seconds until the deadline."""
        return (self.deadline_ns - monotonic_ns()) / NS_PER_S


class Callers(Protocol):
    """Knows who calls."""

    def of(self, metadata: Mapping[str, str]) -> Caller:
        """The caller that a call's metadata (or HTTP headers; names in lower case) shows. Unauthenticated, PermissionDenied."""

    async def run(self) -> None:
        """Keeps what it knows up to date, until cancelled."""

    def reload(self) -> None:
        """Brings it up to date now."""


class EverybodyIsTheDefaultTenant:
    """No keys are configured: whoever reaches a door may call. `x-tenant-id` means nothing then: nobody can be trusted with it."""

    def __init__(self) -> None:
        self._everybody = Caller(is_admin=True)

    def of(self, metadata: Mapping[str, str]) -> Caller:
        """See Callers."""
        return self._everybody

    async def run(self) -> None:
        """See Callers."""
        await asyncio.Event().wait()

    def reload(self) -> None:
        """See Callers."""


class CallIntake:
    """Makes the `Call` of each call from its metadata."""

    def __init__(self, settings: GatewaySettings, callers: Callers) -> None:
        self._settings = settings
        self._callers = callers

    def accept(self, metadata: Mapping[str, str], remaining_s: float | None, span: Span, *, stream: bool) -> Call:
        """The call, which the log of the running task is about from here on. `remaining_s` until the client's deadline, None = it
        has none.

        Unauthenticated, PermissionDenied; InvalidArgument for an id of no use.
        """
        caller = self._callers.of(metadata)
        key = metadata.get("idempotency-key")
        # The key counts first: proxies give each call, a repeated one too, an x-request-id of its own.
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
        )

    def _deadline_after(self, remaining_s: float | None) -> int:
        """Our own deadline: a little before the client's, so that its error is ours and not the transport's."""
        if remaining_s is None or remaining_s > self._settings.max_request_s:
            return monotonic_ns() + int(self._settings.max_request_s * NS_PER_S)
        margin_s = min(DEADLINE_MARGIN_S, 0.2 * remaining_s)
        return monotonic_ns() + int((remaining_s - margin_s) * NS_PER_S)
