"""An OTLP/gRPC trace receiver in this process, which decodes exported spans for the demo and for tests.

Contains the server and the decoded spans with their trees. Not here: creating spans (svc_common.observability.telemetry),
storing or drawing them (in production, Jaeger).

    with OtlpReceiver() as receiver:
        start_services(env={**os.environ, **receiver.environ()})
        receiver.wait(lambda spans: any(s.name == "worker.sequence" for s in spans), timeout_s=10)
        for trace in receiver.traces().values():
            print(trace.trace_id, trace.services)
"""

import sys
import threading
from collections.abc import Callable, Collection, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from types import MappingProxyType, TracebackType
from typing import Any

import grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc
from opentelemetry.proto.common.v1 import common_pb2
from opentelemetry.proto.trace.v1 import trace_pb2

__all__ = ["OtlpReceiver", "ReceivedEvent", "ReceivedLink", "ReceivedSpan", "ReceivedTrace"]

MAX_SPANS = 200_000
_MAX_MESSAGE_BYTES = 64 * 2**20


@dataclass(slots=True, frozen=True)
class ReceivedEvent:
    """An event of a span, at `time_ns` (wall clock)."""

    name: str
    time_ns: int
    attributes: Mapping[str, Any]


@dataclass(slots=True, frozen=True)
class ReceivedLink:
    """A link to a span of the same or another trace. Ids in hex."""

    trace_id: str
    span_id: str
    attributes: Mapping[str, Any]


@dataclass(slots=True, frozen=True)
class ReceivedSpan:
    """One span. Ids in hex (32 and 16 digits); `parent_id` empty = the root of its trace; times are wall clock ns."""

    service: str
    trace_id: str
    span_id: str
    parent_id: str
    name: str
    kind: str
    start_ns: int
    end_ns: int
    attributes: Mapping[str, Any]
    events: tuple[ReceivedEvent, ...]
    links: tuple[ReceivedLink, ...]
    status: str
    status_message: str

    @property
    def duration_s(self) -> float:
        """End minus start."""
        return (self.end_ns - self.start_ns) / 1e9


@dataclass(slots=True, frozen=True)
class ReceivedTrace:
    """The spans of one trace id, ordered by start time."""

    trace_id: str
    spans: tuple[ReceivedSpan, ...]

    @property
    def services(self) -> tuple[str, ...]:
        """Names of the services with spans in the trace, sorted."""
        return tuple(sorted({span.service for span in self.spans}))

    @property
    def roots(self) -> tuple[ReceivedSpan, ...]:
        """Spans without received parent: the top of the tree, and orphans."""
        known = {span.span_id for span in self.spans}
        return tuple(span for span in self.spans if span.parent_id not in known)

    def named(self, name: str) -> tuple[ReceivedSpan, ...]:
        """Spans named `name`."""
        return tuple(span for span in self.spans if span.name == name)

    def children(self, span_id: str) -> tuple[ReceivedSpan, ...]:
        """Child spans of `span_id`."""
        return tuple(span for span in self.spans if span.parent_id == span_id)

    def walk(self) -> Iterator[tuple[int, ReceivedSpan]]:
        """(depth, span) from the roots down, children ordered by start: the lines of a printed tree."""
        stack = [(0, span) for span in reversed(self.roots)]
        while stack:
            depth, span = stack.pop()
            yield depth, span
            stack.extend((depth + 1, child) for child in reversed(self.children(span.span_id)))


class OtlpReceiver(trace_service_pb2_grpc.TraceServiceServicer):
    """Owns the server and the spans received. Context manager; thread-safe.

    Listens on a free port of 127.0.0.1. Keeps the first `max_spans` spans and counts the others in
    `num_dropped`.
    """

    def __init__(self, *, max_spans: int = MAX_SPANS) -> None:
        self._max_spans = max_spans
        self._spans: list[ReceivedSpan] = []
        self._changed = threading.Condition()
        self.num_dropped = 0
        options = [("grpc.so_reuseport", 0), ("grpc.max_receive_message_length", _MAX_MESSAGE_BYTES)]
        self._server = grpc.server(ThreadPoolExecutor(2, thread_name_prefix="otlp-receiver"), options=options)
        trace_service_pb2_grpc.add_TraceServiceServicer_to_server(self, self._server)  # type: ignore[no-untyped-call]
        self.port: int = self._server.add_insecure_port("127.0.0.1:0")

    def __enter__(self) -> "OtlpReceiver":
        self._server.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._server.stop(grace=0.2).wait()

    def __len__(self) -> int:
        return len(self._spans)

    @property
    def endpoint(self) -> str:
        """Value for OTEL_EXPORTER_OTLP_ENDPOINT."""
        return f"http://127.0.0.1:{self.port}"

    def environ(self) -> dict[str, str]:
        """Environment variables that make a service export every trace here, within 0.2 s of a span's end."""
        return {
            "OTEL_EXPORTER_OTLP_ENDPOINT": self.endpoint,
            "OTEL_EXPORTER_OTLP_PROTOCOL": "grpc",
            "OTEL_EXPORTER_OTLP_INSECURE": "true",
            "OTEL_TRACES_EXPORTER": "otlp",
            "OTEL_TRACES_SAMPLER": "parentbased_always_on",
            "OTEL_BSP_SCHEDULE_DELAY": "200",
            "OTEL_EXPORTER_OTLP_TIMEOUT": "10",
        }

    # --- what came in ---------------------------------------------------------------------------------------------

    def Export(
        self, request: trace_service_pb2.ExportTraceServiceRequest, context: grpc.ServicerContext
    ) -> trace_service_pb2.ExportTraceServiceResponse:
        """TraceService.Export: decode and keep the spans."""
        self.take(request)
        return trace_service_pb2.ExportTraceServiceResponse()

    def take(self, request: trace_service_pb2.ExportTraceServiceRequest) -> None:
        """Decode and keep the spans of an export, however it was received."""
        spans = [span for resource in request.resource_spans for span in _spans_of(resource)]
        with self._changed:
            room = max(0, self._max_spans - len(self._spans))
            self._spans.extend(spans[:room])
            self.num_dropped += len(spans[room:])
            self._changed.notify_all()

    def spans(self) -> list[ReceivedSpan]:
        """All spans received so far, in order of arrival."""
        with self._changed:
            return list(self._spans)

    def clear(self) -> None:
        """Forget all spans received so far."""
        with self._changed:
            self._spans.clear()
            self.num_dropped = 0

    def wait(self, predicate: Callable[[list[ReceivedSpan]], bool], timeout_s: float = 10.0) -> list[ReceivedSpan]:
        """Wait until `predicate` holds, and return the spans.

        Raises TimeoutError, naming the spans received, after `timeout_s`.
        """
        with self._changed:
            if self._changed.wait_for(lambda: predicate(list(self._spans)), timeout_s):
                return list(self._spans)
            seen = sorted({f"{span.service}/{span.name}" for span in self._spans})
        raise TimeoutError(f"no such spans within {timeout_s:g} s; received: {', '.join(seen) or 'nothing'}")

    def traces(self) -> dict[str, ReceivedTrace]:
        """Traces by id, in order of their first arrival."""
        by_id: dict[str, list[ReceivedSpan]] = {}
        for span in self.spans():
            by_id.setdefault(span.trace_id, []).append(span)
        return {
            trace_id: ReceivedTrace(trace_id, tuple(sorted(spans, key=lambda span: span.start_ns)))
            for trace_id, spans in by_id.items()
        }


# --- decoding ------------------------------------------------------------------------------------------------------


def _spans_of(resource: trace_pb2.ResourceSpans) -> Iterator[ReceivedSpan]:
    service = str(_attributes(resource.resource.attributes).get("service.name", ""))
    for scope in resource.scope_spans:
        for span in scope.spans:
            yield _span(service, span)


def _span(service: str, span: trace_pb2.Span) -> ReceivedSpan:
    return ReceivedSpan(
        service=service,
        trace_id=span.trace_id.hex(),
        span_id=span.span_id.hex(),
        parent_id=span.parent_span_id.hex(),
        name=span.name,
        kind=trace_pb2.Span.SpanKind.Name(span.kind).removeprefix("SPAN_KIND_"),
        start_ns=span.start_time_unix_nano,
        end_ns=span.end_time_unix_nano,
        attributes=_attributes(span.attributes),
        events=tuple(ReceivedEvent(e.name, e.time_unix_nano, _attributes(e.attributes)) for e in span.events),
        links=tuple(ReceivedLink(k.trace_id.hex(), k.span_id.hex(), _attributes(k.attributes)) for k in span.links),
        status=trace_pb2.Status.StatusCode.Name(span.status.code).removeprefix("STATUS_CODE_"),
        status_message=span.status.message,
    )


def _attributes(pairs: Collection[common_pb2.KeyValue]) -> Mapping[str, Any]:
    return MappingProxyType({sys.intern(pair.key): _value(pair.value) for pair in pairs})


def _value(value: common_pb2.AnyValue) -> Any:
    kind = value.WhichOneof("value")
    if kind is None:
        return None
    if kind == "array_value":
        return tuple(_value(item) for item in value.array_value.values)
    if kind == "kvlist_value":
        return dict(_attributes(value.kvlist_value.values))
    return getattr(value, kind)
