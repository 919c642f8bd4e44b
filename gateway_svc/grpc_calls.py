"""What surrounds each gRPC call of the public services: span, count, typed errors, metadata in and out."""

from collections.abc import Mapping
from types import TracebackType
from typing import Any, Self

import grpc.aio
from opentelemetry.trace import Span

from gateway_svc import spans
from gateway_svc.calls import Call, CallIntake
from gateway_svc.metrics import GatewayMetrics
from svc_common.errors import QuireError
from svc_common.net import rpc
from svc_common.observability import telemetry
from svc_common.version import VERSION

_Context = grpc.aio.ServicerContext[Any, Any]


class OpenCall:
    """Context around one call: ends its span, counts it, and makes every error typed.

    Errors get the request id in their metadata.
    """

    __slots__ = ("_metrics", "_name", "_request_id", "_span", "_told")

    def __init__(self, name: str, span: Span, metrics: GatewayMetrics) -> None:
        self._name = name
        self._span = span
        self._metrics = metrics
        self._request_id = ""
        self._told: QuireError | None = None

    def accept(self, intake: CallIntake, context: _Context, *, stream: bool) -> Call:
        """Take the call in and put its request id on the span."""
        call = intake.accept(metadata_of(context), context.time_remaining(), self._span, stream=stream)
        self._request_id = call.request_id
        spans.set_request_id(self._span, call.request_id)
        return call

    def fail(self, error: QuireError) -> None:
        """Count the call as failed with an error that its answer told."""
        self._told = error

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        known = rpc.hide(error) if isinstance(error, Exception) and not isinstance(error, QuireError) else error
        if isinstance(known, QuireError) and self._request_id:
            known.metadata.setdefault("request_id", self._request_id)
        failure = known or self._told
        if failure is not None:
            spans.set_error(self._span, failure)
        self._span.end()
        self._metrics.call_ended("grpc", self._name, failure)
        if known is not error:
            assert known is not None
            raise known from error


def metadata_of(context: _Context) -> Mapping[str, str]:
    """Metadata of a call, without binary values."""
    given: Any = context.invocation_metadata() or ()
    return {key: value for key, value in given if isinstance(value, str)}


def initial_metadata(request_id: str, span: Span) -> tuple[tuple[str, str], ...]:
    """Metadata that is sent before an answer."""
    ours = (("x-request-id", request_id), ("x-quire-version", VERSION))
    trace_id = telemetry.trace_id(span)
    if not trace_id:
        return ours
    return (*ours, ("x-trace-id", trace_id), ("traceresponse", telemetry.trace_context(span).traceparent))
