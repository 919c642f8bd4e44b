"""Spans of one request at the gateway: a SERVER span around the call and a GenAI span inside it (docs/tracing.md).

Prompts and outputs are included only with `--trace-content` (`span_content`). Without an exporter, the
caller's trace context is still passed through.
"""

import time
from asyncio import CancelledError
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from types import TracebackType
from typing import Self

from opentelemetry.trace import Span, use_span

from gateway_svc.calls import ClientGone
from gateway_svc.checks.validation import AnyRequest, ResolvedRequest
from gateway_svc.generating.generation import Generation
from gateway_svc.metric_definitions import PROVIDER
from gateway_svc.requests.submission_spans import SubmissionSpans
from gateway_svc.span_content import OutputContent, finish_reason, input_messages, stop_sequences
from protos.common.v1 import common_pb2
from protos.inference.v1 import inference_pb2
from svc_common.errors import QuireError
from svc_common.observability import telemetry
from svc_common.observability import trace_names as names
from svc_common.observability.telemetry import SpanKind, Telemetry

CLIENT_GONE = "CLIENT_GONE"
_MAX_SEED = 2**63
_GONE = (ClientGone, CancelledError)
_EVENTS = {
    "CANCELLED": names.CANCELLED,
    "DEADLINE_EXCEEDED": names.EXPIRED,
    **dict.fromkeys(("INTERNAL", "UNAVAILABLE", "ABORTED", "FAILED_PRECONDITION"), names.FAILED),
}
"""Span event by status, for calls that failed; any other status is a refusal."""


class CallSpans:
    """Makes the spans of this gateway's calls. `grpc_at`: host and port of the gRPC API, once it listens.

    `with_content`: put prompts and outputs on spans.
    """

    def __init__(self, tracer: Telemetry, *, with_content: bool = False) -> None:
        self._tracer = tracer
        self._with_content = with_content
        self.grpc_at: tuple[str, int] | None = None

    def server(self, name: str, metadata: Mapping[str, str], attributes: Mapping[str, str | int]) -> Span:
        """Start the span of one call from outside, a child of the W3C context in its metadata; the caller ends it."""
        return self._tracer.span(
            name, parent=telemetry.context_of(metadata), kind=SpanKind.SERVER, attributes=attributes
        )

    def grpc(self, method: str, metadata: Mapping[str, str]) -> Span:
        """Start the span of a gRPC call. `method`: package.Service/Method."""
        attributes: dict[str, str | int] = {names.RPC_SYSTEM: "grpc", names.RPC_METHOD: method}
        if self.grpc_at is not None:
            attributes[names.SERVER_ADDRESS], attributes[names.SERVER_PORT] = self.grpc_at
        return self.server(method, metadata, attributes)

    def generation(self, server_span: Span, operation: str, model: str, request_id: str) -> "GenerationSpan":
        """Make the span of a generation inside a call."""
        return GenerationSpan(self._tracer, server_span, operation, model, request_id, with_content=self._with_content)

    def submission(self, span: Span) -> SubmissionSpans | None:
        """Submission spans under `span`; None if it is not recorded."""
        return SubmissionSpans(self._tracer, span) if span.is_recording() else None


def set_request_id(span: Span, request_id: str) -> None:
    """Put the request id on the span, so that traces can be found by it."""
    if span.is_recording():
        span.set_attribute(names.REQUEST_ID, request_id)


def set_error(span: Span, error: BaseException) -> None:
    """Record a failed call on the span: status, reason, and an event with the error's numbers."""
    if not span.is_recording():
        return
    reason, status = _reason_and_status(error)
    telemetry.set_error(span, reason, status)
    numbers = telemetry.error_numbers(error) if isinstance(error, QuireError) else {names.REASON: reason}
    span.add_event(_EVENTS.get(status, names.REFUSED), numbers)


def _reason_and_status(error: BaseException) -> tuple[str, str]:
    if isinstance(error, QuireError):
        return error.reason, error.status
    return (CLIENT_GONE, "CANCELLED") if isinstance(error, _GONE) else (type(error).__name__, "INTERNAL")


class GenerationSpan:
    """Context around one generation and its span.

    The INTERNAL span is `chat {model}` or `text_completion {model}`; there is none if the call is not
    recorded. `generation`: set once it starts; its result is recorded unless it ends by an error.
    """

    __slots__ = ("_began_s", "_content", "_is_recording", "_model", "_span", "_tracer", "generation")

    def __init__(
        self,
        tracer: Telemetry,
        server_span: Span,
        operation: str,
        model: str,
        request_id: str,
        *,
        with_content: bool = False,
    ) -> None:
        self._tracer = tracer
        self._model = model
        self._began_s = time.monotonic()
        self._is_recording = server_span.is_recording()
        self._content = OutputContent() if with_content and self._is_recording else None
        self._span = server_span
        self.generation: Generation | None = None
        if self._is_recording:
            attributes = {
                names.OPERATION: operation,
                names.PROVIDER: PROVIDER,
                names.REQUEST_MODEL: model,
                names.OUTPUT_TYPE: "text",
                names.RESPONSE_ID: request_id,
                names.REQUEST_ID: request_id,
            }
            parent = telemetry.child_of(server_span)
            self._span = tracer.span(f"{operation} {model}", parent=parent, attributes=attributes)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if not self._is_recording:
            return
        if error is not None:
            telemetry.set_error(self._span, *_reason_and_status(error))
        elif self.generation is not None and self.generation.usage is not None:
            self._set_result(self.generation, self.generation.usage)
        if self._content is not None:
            self._span.set_attribute(names.OUTPUT_MESSAGES, self._content.messages())
        self._span.end()

    @property
    def context(self) -> common_pb2.TraceContext:
        """Trace context for the scheduler, the spans of which become children of this one."""
        return telemetry.trace_context(self._span)

    def set_request(self, request: AnyRequest, resolved: ResolvedRequest, *, stream: bool) -> None:
        """Record the request's parameters, and with content its prompt."""
        if not self._is_recording:
            return
        self._span.set_attributes(_asked(resolved) | {names.REQUEST_STREAM: stream})
        if self._content is not None:
            self._span.set_attribute(names.INPUT_MESSAGES, input_messages(request))
            if texts := stop_sequences(request):
                self._span.set_attribute(names.REQUEST_STOP_SEQUENCES, texts)

    def preparing(self) -> AbstractContextManager[object]:
        """Context around all work before the request is submitted."""
        if not self._is_recording:
            return nullcontext()
        span = self._tracer.span(names.GATEWAY_PREPARE, parent=telemetry.child_of(self._span))
        return use_span(span, end_on_exit=True, record_exception=False, set_status_on_exception=False)

    def submission(self) -> SubmissionSpans | None:
        """Submission spans under this one; None if it is not recorded."""
        return SubmissionSpans(self._tracer, self._span) if self._is_recording else None

    def follow(self, generation: Generation) -> Generation:
        """Attach the generation that started."""
        self.generation = generation
        if self._content is not None:
            generation.on_events = self._content.take
        return generation

    def first_output(self) -> None:
        """Record the time to first output, which is now."""
        if self._is_recording:
            self._span.set_attribute(names.TIME_TO_FIRST_CHUNK, time.monotonic() - self._began_s)

    def _set_result(self, generation: Generation, usage: inference_pb2.Usage) -> None:
        attributes: dict[str, str | int | float | list[str]] = {
            names.RESPONSE_MODEL: self._model,
            names.FINISH_REASONS: [finish_reason(finished) for finished in generation.finished],
            names.OUTPUT_TOKENS: usage.completion_tokens,
            names.CACHE_READ_TOKENS: usage.cached_prompt_tokens,
            names.QUEUE_MS: usage.timing.queue_ms,
            names.NUM_PREEMPTIONS: usage.timing.num_preemptions,
            names.NUM_MIGRATIONS: usage.timing.num_migrations,
        }
        if usage.reasoning_tokens:
            attributes[names.REASONING_TOKENS] = usage.reasoning_tokens
        self._span.set_attributes(attributes)


def _asked(resolved: ResolvedRequest) -> dict[str, str | int | float | bool]:
    """Span attributes of the effective parameters; rare ones only if they differ from the defaults."""
    sampling = resolved.sampling
    attributes: dict[str, str | int | float | bool] = {
        names.SEED: str(sampling.seed),
        names.REQUEST_TEMPERATURE: sampling.temperature,
        names.REQUEST_TOP_P: sampling.top_p,
        names.REQUEST_MAX_TOKENS: resolved.stop.max_tokens,
        names.INPUT_TOKENS: len(resolved.prompt_token_ids),
    }
    rare = {
        names.REQUEST_SEED: sampling.seed if sampling.seed < _MAX_SEED else 0,
        names.REQUEST_TOP_K: sampling.top_k,
        names.REQUEST_FREQUENCY_PENALTY: sampling.frequency_penalty,
        names.REQUEST_PRESENCE_PENALTY: sampling.presence_penalty,
        names.REQUEST_CHOICES: resolved.num_choices if resolved.num_choices > 1 else 0,
    }
    attributes |= {name: value for name, value in rare.items() if value}
    return attributes | {f"{names.LABEL}{name}": value for name, value in resolved.labels.items()}
