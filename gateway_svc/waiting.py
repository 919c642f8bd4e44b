"""Span `gateway.queue` of a request that waits at the gateway, for a model or for the scheduler.

Made only if it waits.
"""

from opentelemetry.trace import Span

from svc_common.observability import telemetry
from svc_common.observability import trace_names as names
from svc_common.observability.telemetry import Telemetry

NO_MODEL = "NO_MODEL"
SCHEDULER_AWAY = "SCHEDULER_AWAY"


class Waiting:
    """The open `gateway.queue` span of one request, a child of `parent`. Each reason is an event with its start time.

    Costs one comparison when idle or if `parent` is not recorded.
    """

    __slots__ = ("_is_recording", "_parent", "_span", "_told", "_tracer")

    def __init__(self, tracer: Telemetry, parent: Span) -> None:
        self._tracer = tracer
        self._parent = parent
        self._is_recording = parent.is_recording()
        self._span: Span | None = None
        self._told = ("", "")

    def because(self, reason: str, why: str) -> None:
        """Record what the request waits for now. `why`: for people."""
        if not self._is_recording:
            return
        if self._span is None:
            self._span = self._tracer.span(names.GATEWAY_QUEUE, parent=telemetry.child_of(self._parent))
        if self._told != (reason, why):
            self._told = reason, why
            self._span.add_event(reason, {names.WHY: why})

    def over(self) -> None:
        """End the span; the request waits no longer. Idempotent."""
        span, self._span = self._span, None
        self._told = ("", "")
        if span is not None:
            span.end()
