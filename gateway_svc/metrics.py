"""Metrics of one gateway, in Prometheus' text form for GET /metrics. One registry, made in the composition root and passed in.

Names and buckets of the `gen_ai.*` ones are OpenTelemetry's (operations.md 2.1), with underscores and units as Prometheus has them.
Labels have few values each: served models, kinds of operations, statuses, documented reasons; never what a caller wrote.
"""

import time
from collections.abc import Callable
from types import TracebackType
from typing import Self

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest

from gateway_svc.calls import ClientGone
from gateway_svc.engine.scheduler_link import SchedulerLink
from gateway_svc.generating.generation import Generation
from protos.inference.v1 import inference_pb2
from svc_common.errors import QuireError
from svc_common.reasons import known_reason

_DURATION_S = (0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.56, 5.12, 10.24, 20.48, 40.96, 81.92)
_TTFT_S = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0)
# Steps on a GPU take less than the 10 ms that the convention begins with.
_TPOT_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5)
_TOKENS = tuple(4**i for i in range(14))

_GONE = ("CANCELLED", "CLIENT_GONE")
_OPERATION = ("gen_ai_operation_name", "gen_ai_request_model")


class GatewayMetrics:
    """Owner of the registry and of what is counted here. All calls on the event loop's thread."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        r = self.registry
        self._duration = Histogram(
            "gen_ai_server_request_duration_seconds",
            "Time from a request's arrival to its end, by how it ended.",
            (*_OPERATION, "error_type"),
            buckets=_DURATION_S,
            registry=r,
        )
        self._ttft = Histogram(
            "gen_ai_server_time_to_first_token_seconds",
            "Time from a request's arrival to its first output.",
            _OPERATION,
            buckets=_TTFT_S,
            registry=r,
        )
        self._tpot = Histogram(
            "gen_ai_server_time_per_output_token_seconds",
            "Time per output token of a choice after the first, as the scheduler saw it.",
            _OPERATION,
            buckets=_TPOT_S,
            registry=r,
        )
        self._tokens = Histogram(
            "gen_ai_client_token_usage",
            "Tokens of a request.",
            (*_OPERATION, "gen_ai_token_type"),
            buckets=_TOKENS,
            registry=r,
        )
        self._in_flight = Gauge(
            "quire_gateway_requests_in_flight", "Requests that have not ended.", ("operation",), registry=r
        )
        self._streams = Gauge("quire_gateway_open_streams", "Of these, those that are streamed.", registry=r)
        self._calls = Counter(
            "quire_gateway_calls",
            "Calls that ended, by door, method and status.",
            ("door", "method", "status"),
            registry=r,
        )
        self._refused = Counter(
            "quire_gateway_errors", "Calls that ended by an error, by its reason.", ("status", "reason"), registry=r
        )

    # --- counting ----------------------------------------------------------------------------------------------------

    def call_ended(self, door: str, method: str, error: BaseException | None) -> None:
        """A call of any kind is over. `door`: "grpc" or "http"; `method`: one of ours, no path of a caller's."""
        status, reason = _kind_of(error)
        self._calls.labels(door, method, status).inc()
        if error is not None:
            self._refused.labels(status, reason).inc()

    def request(self, operation: str, *, stream: bool) -> "RequestMeter":
        """Context around one request that generates or embeds. `operation`: chat, text_completion, resume or embeddings."""
        return RequestMeter(self, operation, stream=stream)

    def begun(self, meter: "RequestMeter") -> None:
        """A request has come."""
        self._in_flight.labels(meter.operation).inc()
        self._streams.inc(meter.stream)

    def ended(self, meter: "RequestMeter", error: BaseException | None) -> None:
        """A request is over, by `error` where it failed."""
        self._in_flight.labels(meter.operation).dec()
        self._streams.dec(meter.stream)
        labels = (meter.operation, meter.model)
        self._duration.labels(*labels, _kind_of(error)[1]).observe(meter.seconds)
        if meter.first_output_s is not None:
            self._ttft.labels(*labels).observe(meter.first_output_s)
        if meter.token_s is not None:
            self._tpot.labels(*labels).observe(meter.token_s)
        if meter.usage is not None:
            self._tokens.labels(*labels, "input").observe(meter.usage.prompt_tokens)
            self._tokens.labels(*labels, "output").observe(meter.usage.completion_tokens)

    # --- looking in --------------------------------------------------------------------------------------------------

    def watch(self, link: SchedulerLink) -> None:
        """The link's state and what it holds, read whenever metrics are asked for."""
        requests = link.requests
        self._gauge(
            "unread_tokens",
            "Tokens held for readers that are slower than generation.",
            lambda: sum(request.num_unread_tokens for request in requests),
        )
        self._gauge("scheduler_requests", "Requests that this gateway has at its scheduler.", lambda: len(requests))
        self._gauge("scheduler_attached", "1: the stream to the scheduler is open.", lambda: link.state.attached)
        self._gauge("scheduler_serving", "1: the scheduler takes and serves requests.", lambda: link.state.serving)

    def _gauge(self, name: str, text: str, value: Callable[[], float]) -> None:
        Gauge(f"quire_gateway_{name}", text, registry=self.registry).set_function(value)

    def text(self) -> tuple[bytes, str]:
        """All of it in Prometheus' text form, and its content type."""
        return generate_latest(self.registry), CONTENT_TYPE_LATEST


class RequestMeter:
    """What is measured of one request while its context lasts. `model`: the served name, empty before it is known.

    `generation`: the one that it began, where it is one that generates; else `usage` is set at its end.
    """

    __slots__ = ("_began_s", "_metrics", "generation", "model", "operation", "stream", "usage")

    def __init__(self, metrics: GatewayMetrics, operation: str, *, stream: bool) -> None:
        self._metrics = metrics
        self._began_s = time.monotonic()
        self.operation = operation
        self.stream = stream
        self.model = ""
        self.generation: Generation | None = None
        self.usage: inference_pb2.Usage | None = None

    def __enter__(self) -> Self:
        self._metrics.begun(self)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self.generation is not None:
            self.usage = self.generation.usage
        self._metrics.ended(self, error)

    @property
    def seconds(self) -> float:
        """Since it came."""
        return time.monotonic() - self._began_s

    @property
    def first_output_s(self) -> float | None:
        """From when it came to its first output."""
        if self.generation is None or self.generation.first_output_ns is None:
            return None
        return max(0.0, self.generation.first_output_ns / 1e9 - self._began_s)

    @property
    def token_s(self) -> float | None:
        """Per output token of a choice after its first."""
        if self.generation is None or self.usage is None:
            return None
        num_steps = self.usage.completion_tokens / self.generation.num_choices - 1
        return self.usage.timing.decode_ms / 1e3 / num_steps if num_steps >= 1 else None


def _kind_of(error: BaseException | None) -> tuple[str, str]:
    """Status and reason, of a bounded set. Whoever leaves is CANCELLED."""
    if error is None:
        return "OK", ""
    if isinstance(error, ClientGone):
        return _GONE
    if isinstance(error, QuireError):
        return error.status, known_reason(error.reason)
    return ("INTERNAL", "INTERNAL") if isinstance(error, Exception) else _GONE
