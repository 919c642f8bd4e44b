"""Export spans in batches by OTLP over gRPC or HTTP, from a thread of the SDK.

Bounded in memory and time; losses are counted. Imports the SDK and the exporter, which add to the start-up
time, so import it only if traces are wanted.
"""

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from opentelemetry.context import Context
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, Span, SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.sampling import Sampler

from svc_common.errors import ConfigError

log = logging.getLogger(__name__)

_SHUTDOWN_S = 2.0
_BREAK_OFF_S = 0.5
_EXPORT_TIMEOUT_S = 2
_TIMEOUTS = ("OTEL_EXPORTER_OTLP_TRACES_TIMEOUT", "OTEL_EXPORTER_OTLP_TIMEOUT")
_PROTOCOLS = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
_GRPC, _HTTP = "grpc", "http/protobuf"
_SECONDS_PER_LINE = 60.0
_LIBRARY_LOGS = ("opentelemetry.exporter", "opentelemetry.sdk._shared_internal")
"""Loggers to which the libraries write at least one line per lost batch."""


@dataclass(frozen=True, slots=True)
class BatchSettings:
    """Maximum number of queued spans, maximum batch size, and maximum delay."""

    max_queue_size: int = 32_768
    max_batch_size: int = 2_048
    delay_ms: int = 1_000

    @classmethod
    def of(cls, environ: Mapping[str, str]) -> "BatchSettings":
        """Read the OTEL_BSP_* variables, with our own defaults."""
        ours = cls()
        queue = _number(environ, "OTEL_BSP_MAX_QUEUE_SIZE", ours.max_queue_size)
        batch = _number(environ, "OTEL_BSP_MAX_EXPORT_BATCH_SIZE", ours.max_batch_size)
        return cls(queue, min(batch, queue), _number(environ, "OTEL_BSP_SCHEDULE_DELAY", ours.delay_ms))


def _number(environ: Mapping[str, str], name: str, default: int) -> int:
    text = environ.get(name, "")
    if text.isascii() and text.isdigit() and int(text) > 0:
        return int(text)
    if text:
        log.warning("%s=%s is no whole number above 0; taking %d", name, text, default)
    return default


class _LastWord(logging.Handler):
    """Log handler that keeps the libraries' last warning instead of writing each."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.text = ""

    def emit(self, record: logging.LogRecord) -> None:
        """Keep the message."""
        self.text = record.getMessage()

    def listen(self) -> None:
        """Redirect the libraries' log lines to this handler only."""
        for name in _LIBRARY_LOGS:
            logger = logging.getLogger(name)
            logger.handlers[:] = [self]
            logger.propagate = False


class LossLog:
    """Logs that spans are lost, at once and then once a minute, and when they arrive again. `why()`: the cause."""

    def __init__(self, why: Callable[[], str], clock: Callable[[], float] = time.monotonic) -> None:
        self._why = why
        self._clock = clock
        self._is_losing = False
        self._said_at = 0.0
        self._num_lost = 0

    def sent(self, num_spans: int, *, arrived: bool) -> None:
        """Record the result of a batch."""
        if arrived:
            if self._is_losing:
                log.warning("spans reach the collector again; %d were lost since the last line", self._num_lost)
            self._is_losing, self._num_lost = False, 0
            return
        self._num_lost += num_spans
        if self._is_losing and self._clock() - self._said_at < _SECONDS_PER_LINE:
            return
        log.warning("%d spans did not reach the collector: %s", self._num_lost, self._why() or "no answer")
        self._is_losing, self._said_at, self._num_lost = True, self._clock(), 0


class CountingExporter(SpanExporter):
    """Exporter that counts the spans it was given and those that were lost. Called by one thread at a time."""

    def __init__(self, inner: SpanExporter, losses: LossLog) -> None:
        self._inner = inner
        self._losses = losses
        self._is_shut = False
        self.num_taken = 0
        self.num_lost = 0

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        """Export a batch and count the result."""
        self.num_taken += len(spans)
        result = SpanExportResult.FAILURE
        try:
            if not self._is_shut:
                result = self._inner.export(spans)
        finally:
            if result is not SpanExportResult.SUCCESS:
                self.num_lost += len(spans)
            self._losses.sent(len(spans), arrived=result is SpanExportResult.SUCCESS)
        return result

    def shutdown(self) -> None:
        """Abort the export in progress. Idempotent."""
        if not self._is_shut:
            self._is_shut = True
            self._inner.shutdown()


class BoundedProcessor(SpanProcessor):
    """The SDK's batch processor with two more bounds.

    Spans beyond a full queue are dropped, and shutdown takes 2.5 s at most. `num_dropped`: spans that were
    dropped or lost. `why_lost()`: why the last batch was lost, for the log.
    """

    def __init__(
        self, exporter: SpanExporter, settings: BatchSettings, why_lost: Callable[[], str] = lambda: ""
    ) -> None:
        self._exporter = CountingExporter(exporter, LossLog(why_lost))
        self._max_queue_size = settings.max_queue_size
        self._num_queued = self._num_left_out = 0
        self._batches = BatchSpanProcessor(
            self._exporter,
            max_queue_size=settings.max_queue_size,
            schedule_delay_millis=settings.delay_ms,
            max_export_batch_size=settings.max_batch_size,
        )

    @property
    def num_dropped(self) -> int:
        """Number of spans that no collector will receive."""
        return self._num_left_out + self._exporter.num_lost

    def on_start(self, span: Span, parent_context: Context | None = None) -> None:
        """No-op."""

    def on_end(self, span: ReadableSpan) -> None:
        """Queue the span if there is room; never waits."""
        if self._num_queued - self._exporter.num_taken >= self._max_queue_size:
            self._num_left_out += 1
            return
        self._num_queued += 1
        self._batches.on_end(span)

    def shutdown(self) -> None:
        """Send the remaining spans, for two seconds at most; the rest is lost."""
        ending = threading.Thread(target=self._batches.shutdown, name="last-spans", daemon=True)
        ending.start()
        ending.join(_SHUTDOWN_S)
        self._exporter.shutdown()
        ending.join(_BREAK_OFF_S)

    def force_flush(self, timeout_millis: int | None = None) -> bool:
        """Flush all spans. Waits for the collector, so not for a running service."""
        return self._batches.force_flush(timeout_millis)


def provider(
    name: str, resource: Mapping[str, str], environ: Mapping[str, str], sampler: Sampler | None
) -> TracerProvider:
    """Make a provider. `name`: the service's; `sampler` None: as the OTEL variables define."""
    attributes = {"service.name": environ.get("OTEL_SERVICE_NAME") or name, **resource}
    return TracerProvider(sampler=sampler, resource=Resource.create(attributes), shutdown_on_exit=False)


def exporting(environ: Mapping[str, str]) -> BoundedProcessor:
    """Make the exporting processor for the collector that the variables name.

    Raises ConfigError for an unsupported protocol.
    """
    timeout_s = None if any(environ.get(name) for name in _TIMEOUTS) else _EXPORT_TIMEOUT_S
    exporter, last_word = _exporter(environ, timeout_s), _LastWord()
    last_word.listen()
    return BoundedProcessor(exporter, BatchSettings.of(environ), lambda: last_word.text)


def _exporter(environ: Mapping[str, str], timeout_s: float | None) -> SpanExporter:
    """Make the exporter of the configured protocol; imports only that one."""
    name = next((name for name in _PROTOCOLS if environ.get(name)), _PROTOCOLS[-1])
    protocol = environ.get(name) or _GRPC
    if protocol == _GRPC:
        from opentelemetry.exporter.otlp.proto.grpc import trace_exporter as over_grpc  # noqa: PLC0415

        return over_grpc.OTLPSpanExporter(timeout=timeout_s)
    if protocol == _HTTP:
        from opentelemetry.exporter.otlp.proto.http import trace_exporter as over_http  # noqa: PLC0415

        return over_http.OTLPSpanExporter(timeout=timeout_s)
    raise ConfigError(
        f"{name}={protocol} is not offered; use {_GRPC} or {_HTTP}",
        reason="INVALID_SETTING",
        metadata={"setting": name, "value": protocol},
    )
