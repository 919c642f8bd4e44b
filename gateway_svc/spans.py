"""Spans of one request at the gateway: a SERVER span around the call and a GenAI span inside it (operations.md 2.1, 2.4).

Never prompts or outputs. Off (no exporter configured), the caller's trace context still passes through.
"""

import time
from collections.abc import Mapping
from types import TracebackType
from typing import Self

from opentelemetry.trace import Span, Status, StatusCode

from gateway_svc.checks.validation import ResolvedRequest
from gateway_svc.generating.generation import Generation
from protos.common.v1 import common_pb2
from protos.inference.v1 import inference_pb2
from svc_common import telemetry
from svc_common.errors import QuireError
from svc_common.telemetry import SpanKind, Telemetry

PROVIDER = "quire"
_CALLERS_FAULTS = frozenset({"INVALID_ARGUMENT", "OUT_OF_RANGE", "NOT_FOUND", "ALREADY_EXISTS", "CANCELLED"})


def start_server_span(tracer: Telemetry, name: str, metadata: Mapping[str, str], attributes: Mapping[str, str]) -> Span:
    """The span of one call from outside, child of the W3C context in its metadata; the caller ends it."""
    return tracer.span(name, parent=telemetry.context_of(metadata), kind=SpanKind.SERVER, attributes=attributes)


def set_error(span: Span, error: BaseException) -> None:
    """Notes how a call failed; what is the caller's own fault or wish is not marked as an error of ours."""
    status = error.status if isinstance(error, QuireError) else "INTERNAL"
    span.set_attribute("error.type", error.reason if isinstance(error, QuireError) else type(error).__name__)
    if status not in _CALLERS_FAULTS:
        span.set_status(Status(StatusCode.ERROR, status))


class GenerationSpan:
    """Context around one generation: the INTERNAL span `chat {model}` or `text_completion {model}`.

    `generation`: set once it has begun; what it came to is noted where it ends by no error.
    """

    __slots__ = ("_began_s", "_model", "_span", "generation")

    def __init__(self, tracer: Telemetry, server_span: Span, operation: str, model: str, request_id: str) -> None:
        attributes = {
            "gen_ai.operation.name": operation,
            "gen_ai.provider.name": PROVIDER,
            "gen_ai.request.model": model,
            "gen_ai.output.type": "text",
            "gen_ai.response.id": request_id,
            "quire.request_id": request_id,
        }
        parent = telemetry.child_of(server_span)
        self._span = tracer.span(f"{operation} {model}", parent=parent, attributes=attributes)
        self._model = model
        self._began_s = time.monotonic()
        self.generation: Generation | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is not None:
            set_error(self._span, error)
        elif self.generation is not None and self.generation.usage is not None:
            self._set_result(_reasons(self.generation), self.generation.usage)
        self._span.end()

    @property
    def context(self) -> common_pb2.TraceContext:
        """For the scheduler: its spans are children of this one."""
        return telemetry.trace_context(self._span)

    def set_request(self, resolved: ResolvedRequest, *, stream: bool) -> None:
        """What is asked for, without the prompt."""
        if not self._span.is_recording():
            return
        sampling, stop = resolved.sampling, resolved.stop
        self._span.set_attributes(
            {
                "gen_ai.request.stream": stream,
                "gen_ai.request.seed": str(sampling.seed),
                "gen_ai.request.temperature": sampling.temperature,
                "gen_ai.request.top_p": sampling.top_p,
                "gen_ai.request.top_k": sampling.top_k,
                "gen_ai.request.max_tokens": stop.max_tokens,
                "gen_ai.request.choice.count": resolved.num_choices,
                "gen_ai.usage.input_tokens": len(resolved.prompt_token_ids),
                **{f"quire.label.{name}": value for name, value in resolved.labels.items()},
            }
        )

    def first_output(self) -> None:
        """It has come, now."""
        self._span.set_attribute("gen_ai.response.time_to_first_chunk", time.monotonic() - self._began_s)

    def _set_result(self, finish_reasons: list[str], usage: inference_pb2.Usage) -> None:
        self._span.set_attributes(
            {
                "gen_ai.response.model": self._model,
                "gen_ai.response.finish_reasons": finish_reasons,
                "gen_ai.usage.output_tokens": usage.completion_tokens,
                "gen_ai.usage.cache_read.input_tokens": usage.cached_prompt_tokens,
                "quire.queue_ms": usage.timing.queue_ms,
                "quire.num_preemptions": usage.timing.num_preemptions,
            }
        )


def _reasons(generation: Generation) -> list[str]:
    names = [common_pb2.FinishReason.Name(finished.reason) for finished in generation.finished]
    return [name.removeprefix("FINISH_REASON_").lower() for name in names]
