"""Calls from outside, whichever door they come through: who calls, under which id, until when. Both make them by `CallIntake`."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from opentelemetry.trace import Span

from gateway_svc.request_ids import accept_request_id
from gateway_svc.settings import GatewaySettings
from svc_common.clock import NS_PER_S, monotonic_ns

DEADLINE_MARGIN_S = 0.05


@dataclass(frozen=True, slots=True)
class Caller:
    """Who calls. `tenant`: empty = the default one."""

    tenant: str = ""


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


class EverybodyIsTheDefaultTenant:
    """No keys are configured: whoever reaches the door may call."""

    def of(self, metadata: Mapping[str, str]) -> Caller:
        """See Callers."""
        return Caller()


class CallIntake:
    """Makes the `Call` of each call from its metadata."""

    def __init__(self, settings: GatewaySettings, callers: Callers) -> None:
        self._settings = settings
        self._callers = callers

    def accept(self, metadata: Mapping[str, str], remaining_s: float | None, span: Span, *, stream: bool) -> Call:
        """The call. `remaining_s` until the client's deadline, None = it has none.

        Unauthenticated, PermissionDenied; InvalidArgument for an id of no use.
        """
        caller = self._callers.of(metadata)
        key = metadata.get("idempotency-key")
        return Call(
            accept_request_id(metadata.get("x-request-id") or key),
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
