"""Traces: one OpenTelemetry set-up for all services, and W3C trace context in and out of messages.

Off unless the standard variables name a destination (`OTEL_EXPORTER_OTLP_ENDPOINT`,
`OTEL_EXPORTER_OTLP_TRACES_ENDPOINT` or `OTEL_TRACES_EXPORTER=otlp`). Spans are sent in batches by OTLP over
gRPC or HTTP; a dead collector costs only spans. If off, every call here is a no-op of the API package. Names
of spans, events and attributes are in `trace_names`, export in `trace_export`, sampling in `trace_sampling`.
"""

import os
from collections.abc import Callable, Mapping
from typing import Any

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.trace import Link, NoOpTracerProvider, Span, SpanKind, Status, StatusCode, TracerProvider
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from protos.common.v1 import common_pb2
from svc_common.errors import QuireError
from svc_common.observability import trace_names as names
from svc_common.version import VERSION

__all__ = [
    "MAX_STEP_LINKS",
    "SpanKind",
    "Telemetry",
    "child_of",
    "context_of",
    "error_numbers",
    "is_sampled",
    "note_stage",
    "set_error",
    "setup",
    "step_links",
    "trace_context",
    "trace_id",
]

MAX_STEP_LINKS = 32
_ODD_HEX_DIGITS = frozenset("13579bdf")
_CALLERS_FAULTS = frozenset({"INVALID_ARGUMENT", "OUT_OF_RANGE", "NOT_FOUND", "ALREADY_EXISTS", "CANCELLED"})
_PROPAGATOR = TraceContextTextMapPropagator()


class Telemetry:
    """Tracer of one service, owned by its composition root; call `shutdown()` at the end (bounded)."""

    def __init__(self, provider: TracerProvider, *, enabled: bool, num_dropped: Callable[[], int] = lambda: 0) -> None:
        self._provider = provider
        self._num_dropped = num_dropped
        self.enabled = enabled
        self.tracer = provider.get_tracer("quire", VERSION)

    def span(
        self,
        name: str,
        *,
        parent: Context | None = None,
        kind: SpanKind = SpanKind.INTERNAL,
        attributes: Mapping[str, Any] | None = None,
        links: list[Link] | None = None,
        start_ns: int | None = None,
    ) -> Span:
        """Start a span; the caller ends it. `start_ns` is wall time. `parent=None` starts a new trace."""
        return self.tracer.start_span(
            name, context=parent or Context(), kind=kind, attributes=attributes, links=links, start_time=start_ns
        )

    @property
    def num_dropped_spans(self) -> int:
        """Number of spans that did not reach the collector: the queue was full, or sending failed."""
        return self._num_dropped()

    def shutdown(self) -> None:
        """Send the remaining spans, for two seconds at most."""
        if shutdown := getattr(self._provider, "shutdown", None):
            shutdown()


def _wanted(environ: Mapping[str, str]) -> bool:
    exporter = environ.get("OTEL_TRACES_EXPORTER", "")
    if environ.get("OTEL_SDK_DISABLED", "").lower() == "true" or exporter == "none":
        return False
    endpoints = ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")
    return exporter == "otlp" or any(environ.get(name) for name in endpoints)


def setup(
    service: str, *, instance_id: str = "", max_forced_per_s: float | None = None, samples_own_roots: bool = False
) -> Telemetry:
    """Set up telemetry for `service` ("gateway", "scheduler", "worker"); `service.name` becomes `quire-<service>`.

    `instance_id`: names this process. `max_forced_per_s`: traces per second that callers may force although
    the sampler would skip them; None = unlimited, for callers that are services of Quire.
    `samples_own_roots`: the service itself chooses which root traces to start.
    """
    if not _wanted(os.environ):
        return Telemetry(NoOpTracerProvider(), enabled=False)
    # Imported only if traces are wanted: SDK and exporter add to the start-up time.
    from svc_common.observability import trace_export, trace_sampling  # noqa: PLC0415

    sampler = None
    if max_forced_per_s is not None:
        sampler = trace_sampling.front_door(os.environ, max_forced_per_s)
    elif samples_own_roots:
        sampler = trace_sampling.own_roots(os.environ)
    resource = {"service.namespace": "quire", "service.version": VERSION}
    resource |= {"service.instance.id": instance_id} if instance_id else {}
    provider = trace_export.provider(f"quire-{service}", resource, os.environ, sampler)
    processor = trace_export.exporting(os.environ)
    provider.add_span_processor(processor)
    return Telemetry(provider, enabled=True, num_dropped=lambda: processor.num_dropped)


def context_of(message: common_pb2.TraceContext | Mapping[str, str]) -> Context | None:
    """Trace context of a message or of call metadata; None if there is none."""
    if isinstance(message, common_pb2.TraceContext):
        carrier = {"traceparent": message.traceparent, "tracestate": message.tracestate}
    else:
        carrier = {"traceparent": message.get("traceparent", ""), "tracestate": message.get("tracestate", "")}
    if not carrier["traceparent"]:
        return None
    context = _PROPAGATOR.extract(carrier, Context())
    return context if trace.get_current_span(context).get_span_context().is_valid else None


def trace_context(span: Span) -> common_pb2.TraceContext:
    """Trace context of the span as a message field; empty if it has no valid context."""
    if not span.get_span_context().is_valid:
        return common_pb2.TraceContext()
    carrier: dict[str, str] = {}
    _PROPAGATOR.inject(carrier, trace.set_span_in_context(span, Context()))
    return common_pb2.TraceContext(traceparent=carrier.get("traceparent", ""), tracestate=carrier.get("tracestate", ""))


def is_sampled(message: common_pb2.TraceContext) -> bool:
    """True if the trace is recorded, by the last bit of its flags. Cheap; an invalid context may also give True."""
    return message.traceparent[54:55] in _ODD_HEX_DIGITS


def set_error(span: Span, reason: str, status: str) -> None:
    """Record a failure on the span.

    `status`: gRPC's name; statuses caused by the caller do not mark the span as an error.
    """
    span.set_attribute(names.ERROR_TYPE, reason)
    if status not in _CALLERS_FAULTS:
        span.set_status(Status(StatusCode.ERROR, status))


def note_stage(name: str, attributes: Mapping[str, str | int]) -> None:
    """Add an event for a stage of the work that just ended to the current span (`trace.use_span`).

    No-op without a current span, or if it is not recorded.
    """
    trace.get_current_span().add_event(name, attributes)


def error_numbers(error: QuireError) -> dict[str, str | int | float]:
    """Reason, metadata and retry time of an error, as event attributes."""
    numbers: dict[str, str | int | float] = {names.REASON: error.reason}
    for name, value in error.metadata.items():
        numbers[f"{names.PREFIX}{name}"] = int(value) if value.isascii() and value.isdigit() else value
    if error.retry_after_s is not None:
        numbers[names.RETRY_AFTER_S] = error.retry_after_s
    return numbers


def child_of(span: Span) -> Context:
    """Context for children of `span`."""
    return trace.set_span_in_context(span, Context())


def trace_id(span: Span) -> str:
    """32 hex digits; empty if the span has no trace."""
    context = span.get_span_context()
    return trace.format_trace_id(context.trace_id) if context.is_valid else ""


def step_links(contexts: list[common_pb2.TraceContext]) -> list[Link]:
    """Links to the first 32 sampled requests of a step (the SDK silently drops those past 128)."""
    links: list[Link] = []
    for message in contexts:
        context = context_of(message)
        span_context = trace.get_current_span(context).get_span_context() if context else None
        if span_context is not None and span_context.trace_flags.sampled:
            links.append(Link(span_context))
        if len(links) == MAX_STEP_LINKS:
            break
    return links
