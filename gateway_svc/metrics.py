"""Metrics of one gateway for GET /metrics, in Prometheus text format or OpenMetrics.

One registry, made in the composition root. What each metric counts is in `metric_definitions`.
"""

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Self

from opentelemetry.trace import Span
from prometheus_client.exposition import choose_encoder
from prometheus_client.metrics_core import Metric

from gateway_svc import metric_definitions as d
from gateway_svc.calls import ClientGone
from gateway_svc.engine.scheduler_link import SchedulerLink
from gateway_svc.generating.generation import Generation
from protos.inference.v1 import inference_pb2
from svc_common.errors import QuireError
from svc_common.observability.metrics import DroppedSpans, MetricSpec, exemplar_of, new_registry
from svc_common.observability.telemetry import Telemetry
from svc_common.reasons import known_reason

log = logging.getLogger(__name__)

_GONE = ("CANCELLED", "CLIENT_GONE")


class GatewayMetrics:
    """Registry and counters of this gateway. Call only on the event loop's thread."""

    def __init__(self, tracing: Telemetry) -> None:
        self.registry = r = new_registry()
        self._duration, self._ttft = d.DURATION.histogram(r), d.TTFT.histogram(r)
        self._tpot, self._tokens = d.TPOT.histogram(r), d.TOKENS.histogram(r)
        self._in_flight, self._streams = d.IN_FLIGHT.gauge(r), d.STREAMS.gauge(r)
        self._calls, self._refused = d.CALLS.counter(r), d.ERRORS.counter(r)
        r.register(DroppedSpans(tracing))

    # --- counting ----------------------------------------------------------------------------------------------------

    def call_ended(self, door: str, method: str, error: BaseException | None) -> None:
        """Count a call of any kind that ended.

        `door`: "grpc" or "http"; `method`: one of a fixed set, never a path from the client.
        """
        status, reason = _kind_of(error)
        log.info("%s %s ended: %s", door, method, f"{status} {reason}" if reason else status)
        self._calls.labels(door, method, status).inc()
        if error is not None:
            self._refused.labels(status, reason).inc()

    def request(self, operation: str, *, stream: bool, span: Span) -> "RequestMeter":
        """Context around one request. `operation`: chat, text_completion, resume or embeddings.

        `span`: of its call; if recorded, exemplars of the request's times name the trace.
        """
        return RequestMeter(self, operation, stream, exemplar_of(span))

    def begun(self, meter: "RequestMeter") -> None:
        """Count a request that started."""
        self._in_flight.labels(meter.operation).inc()
        self._streams.inc(meter.stream)

    def ended(self, meter: "RequestMeter", error: BaseException | None) -> None:
        """Observe a request that ended, with `error` if it failed."""
        self._in_flight.labels(meter.operation).dec()
        self._streams.dec(meter.stream)
        labels = (meter.operation, d.PROVIDER, meter.model)
        self._duration.labels(*labels, _kind_of(error)[1]).observe(meter.seconds, meter.exemplar)
        if meter.first_output_s is not None:
            self._ttft.labels(*labels).observe(meter.first_output_s, meter.exemplar)
        if meter.token_s is not None:
            self._tpot.labels(*labels).observe(meter.token_s, meter.exemplar)
        if meter.usage is not None:
            self._tokens.labels(*labels, "input").observe(meter.usage.prompt_tokens)
            self._tokens.labels(*labels, "output").observe(meter.usage.completion_tokens)

    def histograms(self) -> Iterator[Metric]:
        """The histograms of requests with their present values."""
        for histogram in (self._duration, self._ttft, self._tpot, self._tokens):
            yield from histogram.collect()

    # --- gauges and output -------------------------------------------------------------------------------------------

    def watch(self, links: Sequence[SchedulerLink]) -> None:
        """Register gauges of the links' states and their requests, read whenever metrics are scraped."""
        self._gauge(d.UNREAD, lambda: sum(request.num_unread_tokens for link in links for request in link.requests))
        self._gauge(d.AT_SCHEDULER, lambda: sum(len(link.requests) for link in links))
        self._gauge(d.ATTACHED, lambda: all(link.state.attached for link in links))
        self._gauge(d.SERVING, lambda: all(link.state.serving for link in links))

    def _gauge(self, spec: MetricSpec, value: Callable[[], float]) -> None:
        spec.gauge(self.registry).set_function(value)

    def text(self, accept: str) -> tuple[bytes, str]:
        """Return the metrics in the format that the Accept header asks for, and its content type.

        Only OpenMetrics has exemplars.
        """
        encode, content_type = choose_encoder(accept)
        return encode(self.registry), content_type


@dataclass(slots=True)
class RequestMeter:
    """Measurements of one request while its context lasts. `model`: the served name, empty before it is known.

    `generation`: set for a request that generates; for others `usage` is set at the end. `exemplar`: of its
    trace, None if not recorded.
    """

    metrics: GatewayMetrics
    operation: str
    stream: bool
    exemplar: dict[str, str] | None
    model: str = ""
    generation: Generation | None = None
    usage: inference_pb2.Usage | None = None
    _began_s: float = field(default_factory=time.monotonic)

    def __enter__(self) -> Self:
        self.metrics.begun(self)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self.generation is not None:
            self.usage = self.generation.usage
        self.metrics.ended(self, error)

    @property
    def seconds(self) -> float:
        """Seconds since the request arrived."""
        return time.monotonic() - self._began_s

    @property
    def first_output_s(self) -> float | None:
        """Seconds from the request's arrival to its first output."""
        if self.generation is None or self.generation.first_output_ns is None:
            return None
        return max(0.0, self.generation.first_output_ns / 1e9 - self._began_s)

    @property
    def token_s(self) -> float | None:
        """Seconds per output token of a choice after its first."""
        if self.generation is None or self.usage is None:
            return None
        num_steps = self.usage.completion_tokens / self.generation.num_choices - 1
        return self.usage.timing.decode_ms / 1e3 / num_steps if num_steps >= 1 else None


def _kind_of(error: BaseException | None) -> tuple[str, str]:
    """Status and reason, from a bounded set. A client that disconnects counts as CANCELLED."""
    if error is None:
        return "OK", ""
    if isinstance(error, ClientGone):
        return _GONE
    if isinstance(error, QuireError):
        return error.status, known_reason(error.reason)
    return ("INTERNAL", "INTERNAL") if isinstance(error, Exception) else _GONE
