"""Trace events of a request's submission: `submitted` and `completed`.

Also makes spans for the time that the scheduler was away.
"""

from opentelemetry.trace import Span

from gateway_svc.waiting import SCHEDULER_AWAY, Waiting
from svc_common.clock import wall_ns
from svc_common.observability import telemetry
from svc_common.observability import trace_names as names
from svc_common.observability.telemetry import Telemetry


class SubmissionSpans:
    """Adds events and child spans to `span`. Makes nothing if `span` is not recorded."""

    __slots__ = ("_sent_ns", "_span", "_tracer", "_waiting")

    def __init__(self, tracer: Telemetry, span: Span) -> None:
        self._tracer = tracer
        self._span = span
        self._waiting = Waiting(tracer, span)
        self._sent_ns = 0

    def sent(self) -> None:
        """Record that the request is in a message to the scheduler."""
        self._waiting.over()
        if self._span.is_recording():
            self._sent_ns = wall_ns()
            self._span.add_event(names.SUBMITTED, timestamp=self._sent_ns)

    def away(self, why: str, num_output_tokens: int) -> None:
        """Record that the scheduler is away, after `num_output_tokens`.

        The scheduler's own measurements of the request may be lost with it, so a span covers the time since
        the submission.
        """
        if self._sent_ns:
            attributes = {names.OUTPUT_TOKENS: num_output_tokens, names.REASON: SCHEDULER_AWAY}
            parent = telemetry.child_of(self._span)
            lost = self._tracer.span(names.GATEWAY_LOST, parent=parent, attributes=attributes, start_ns=self._sent_ns)
            lost.end()
            self._sent_ns = 0
        self._waiting.because(SCHEDULER_AWAY, why)

    def completed(self) -> None:
        """Record the scheduler's last message, or the error that ended the request here."""
        self._waiting.over()
        if self._span.is_recording():
            self._span.add_event(names.COMPLETED)
