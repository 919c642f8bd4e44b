"""Traces: one OpenTelemetry set-up for all services, and W3C context in and out of messages (design.md 9).

Off unless the standard variables name a destination (`OTEL_EXPORTER_OTLP_ENDPOINT`, `OTEL_EXPORTER_OTLP_TRACES_ENDPOINT` or
`OTEL_TRACES_EXPORTER=otlp`); then spans go out in batches by OTLP/gRPC, and a dead collector costs nothing but dropped spans.
Off, every call here is a no-op of the API package. Attribute names of OTel's GenAI conventions are kept here as strings.
"""

import os
from collections.abc import Mapping
from typing import Any

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.trace import Link, NoOpTracerProvider, Span, SpanKind, TracerProvider
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from protos.common.v1 import common_pb2
from svc_common.version import VERSION

__all__ = ["MAX_STEP_LINKS", "SpanKind", "Telemetry", "context_of", "setup", "step_links", "trace_context", "trace_id"]

MAX_STEP_LINKS = 32
_FLUSH_TIMEOUT_MS = 2_000
_PROPAGATOR = TraceContextTextMapPropagator()


class Telemetry:
    """Tracer of one service; owned by its composition root, `shutdown()` at the end (bounded)."""

    def __init__(self, provider: TracerProvider, *, enabled: bool) -> None:
        self._provider = provider
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
        """Starts a span; the caller ends it. `start_ns` is wall time. `parent=None` starts a new trace."""
        return self.tracer.start_span(
            name, context=parent or Context(), kind=kind, attributes=attributes, links=links, start_time=start_ns
        )

    def shutdown(self) -> None:
        """Sends what is left, for two seconds at most."""
        for method in ("force_flush", "shutdown"):
            call = getattr(self._provider, method, None)
            if call is not None:
                call(_FLUSH_TIMEOUT_MS) if method == "force_flush" else call()


def _wanted(environ: Mapping[str, str]) -> bool:
    exporter = environ.get("OTEL_TRACES_EXPORTER", "")
    if environ.get("OTEL_SDK_DISABLED", "").lower() == "true" or exporter == "none":
        return False
    endpoints = ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")
    return exporter == "otlp" or any(environ.get(name) for name in endpoints)


def setup(service: str) -> Telemetry:
    """Telemetry for `service` ("gateway", "scheduler", "worker"); `service.name` becomes `quire-<service>`."""
    if not _wanted(os.environ):
        return Telemetry(NoOpTracerProvider(), enabled=False)
    return Telemetry(_sdk_provider(service), enabled=True)


def _sdk_provider(service: str) -> TracerProvider:
    # Optional backend: importing SDK and exporter costs start-up time, so only when traces are wanted.
    from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter  # noqa: PLC0415
    from opentelemetry.sdk.resources import Resource  # noqa: PLC0415
    from opentelemetry.sdk.trace import TracerProvider as SdkTracerProvider  # noqa: PLC0415
    from opentelemetry.sdk.trace.export import BatchSpanProcessor  # noqa: PLC0415

    name = os.environ.get("OTEL_SERVICE_NAME") or f"quire-{service}"
    resource = Resource.create({"service.name": name, "service.namespace": "quire", "service.version": VERSION})
    provider = SdkTracerProvider(resource=resource, shutdown_on_exit=False)
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(timeout=2), max_queue_size=32_768))
    return provider


def context_of(message: common_pb2.TraceContext | Mapping[str, str]) -> Context | None:
    """The context named by a message or by call metadata; None where there is none."""
    if isinstance(message, common_pb2.TraceContext):
        carrier = {"traceparent": message.traceparent, "tracestate": message.tracestate}
    else:
        carrier = {key: message[key] for key in ("traceparent", "tracestate") if key in message}
    if not carrier.get("traceparent"):
        return None
    context = _PROPAGATOR.extract(carrier, Context())
    return context if trace.get_current_span(context).get_span_context().is_valid else None


def trace_context(span: Span) -> common_pb2.TraceContext:
    """The span as a message field; empty when it is not recorded by a sampled trace."""
    if not span.get_span_context().is_valid:
        return common_pb2.TraceContext()
    carrier: dict[str, str] = {}
    _PROPAGATOR.inject(carrier, trace.set_span_in_context(span, Context()))
    return common_pb2.TraceContext(traceparent=carrier.get("traceparent", ""), tracestate=carrier.get("tracestate", ""))


def child_of(span: Span) -> Context:
    """Context for children of `span`."""
    return trace.set_span_in_context(span, Context())


def trace_id(span: Span) -> str:
    """32 hex digits, or empty when the span belongs to no trace."""
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
