"""Spans while the collector is slow, failing or gone: no service waits, memory is bounded, losses are counted (2.4)."""

import threading
import time
from collections.abc import Iterator
from typing import Any

import grpc
import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult

from quire.local_stack.otlp_receiver import OtlpReceiver
from svc_common.errors import ConfigError
from svc_common.observability import telemetry, trace_export
from svc_common.observability.trace_export import BatchSettings, BoundedProcessor, LossLog
from tests.support.services.harness import run_async, stack
from tests.traces.http_collector import posted_to
from tests.traces.serving import exporting

_FREE_S = 0.5
_SHUTDOWN_S = 0.3
"""Instead of two seconds, so that these tests do not wait as long."""
_SLACK_S = 1.5


class IllReceiver(OtlpReceiver):
    """Refuses exports with the status `fail`, if it is set; answers none between `hang` and `go_on`. `num_calls`: all of them."""

    def __init__(self) -> None:
        super().__init__()
        self.fail: grpc.StatusCode | None = None
        self.num_calls = 0
        self._goes_on = threading.Event()
        self.go_on()

    def __exit__(self, *error: Any) -> None:
        self.go_on()
        super().__exit__(*error)

    def hang(self) -> None:
        """Stop answering."""
        self._goes_on.clear()

    def go_on(self) -> None:
        """Answer again, also those that wait."""
        self._goes_on.set()

    def Export(self, request: Any, context: grpc.ServicerContext) -> Any:
        """As it is told to."""
        self.num_calls += 1
        self._goes_on.wait()
        if self.fail is not None:
            context.abort(self.fail, "told to fail")
        return super().Export(request, context)


@pytest.fixture
def otlp() -> Iterator[IllReceiver]:
    """One that may be made ill."""
    with IllReceiver() as receiver:
        yield receiver


@pytest.fixture
def sending(otlp: IllReceiver, monkeypatch: pytest.MonkeyPatch) -> Iterator[IllReceiver]:
    """Services export to it, with the shortest of timeouts."""
    monkeypatch.setattr(trace_export, "_SHUTDOWN_S", _SHUTDOWN_S)
    with exporting(otlp, monkeypatch, OTEL_EXPORTER_OTLP_TIMEOUT="1", OTEL_BSP_SCHEDULE_DELAY="50"):
        yield otlp


@pytest.mark.parametrize("variable", ["OTEL_EXPORTER_OTLP_PROTOCOL", "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL"])
def test_spans_go_out_over_http_where_the_variables_say_so(
    otlp: IllReceiver, monkeypatch: pytest.MonkeyPatch, variable: str
) -> None:
    """`http/protobuf`, for all signals or for traces alone: POST /v1/traces."""
    protocols = {"OTEL_EXPORTER_OTLP_PROTOCOL": "grpc", variable: "http/protobuf"}
    with posted_to(otlp) as environ, exporting(otlp, monkeypatch, **{**environ, **protocols}):
        service = telemetry.setup("worker")
        service.span("worker.step").end()
        service.shutdown()
    assert [(span.service, span.name) for span in otlp.spans()] == [("quire-worker", "worker.step")]
    assert otlp.num_calls == 0 and service.num_dropped_spans == 0, "over HTTP alone"


@pytest.mark.parametrize("protocol", ["http/json", "GRPC", "zipkin"])
def test_a_protocol_that_is_not_offered_is_refused(
    otlp: IllReceiver, monkeypatch: pytest.MonkeyPatch, protocol: str
) -> None:
    """With its name and what there is instead."""
    words = f"OTEL_EXPORTER_OTLP_PROTOCOL={protocol} .* use grpc or http/protobuf"
    with exporting(otlp, monkeypatch, OTEL_EXPORTER_OTLP_PROTOCOL=protocol), pytest.raises(ConfigError, match=words):
        telemetry.setup("gateway")


def test_a_dead_collector_is_one_line_a_minute(caplog: pytest.LogCaptureFixture) -> None:
    """At once, each minute with how many more were lost, and when they arrive again."""
    now_s = 100.0
    losses = LossLog(lambda: "connection refused", lambda: now_s)
    for now_s in range(100, 230):  # noqa: B007
        losses.sent(2, arrived=False)
    losses.sent(2, arrived=True)
    losses.sent(2, arrived=True)
    assert [record.getMessage() for record in caplog.records] == [
        "2 spans did not reach the collector: connection refused",
        "120 spans did not reach the collector: connection refused",
        "120 spans did not reach the collector: connection refused",
        "spans reach the collector again; 18 were lost since the last line",
    ]


def test_what_the_libraries_write_of_each_batch_is_in_that_line(
    sending: IllReceiver, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Ten batches that the collector does not accept are one line, with the reason."""
    sending.fail = grpc.StatusCode.INVALID_ARGUMENT
    service = telemetry.setup("gateway")
    for i in range(10):
        service.span("chat").end()
        deadline = time.monotonic() + 20
        while service.num_dropped_spans <= i and time.monotonic() < deadline:
            time.sleep(0.01)
    service.shutdown()
    told = [record.getMessage() for record in caplog.records if "telemetry" in record.name or "trace" in record.name]
    assert len(told) == 1 and "INVALID_ARGUMENT" in told[0] and service.num_dropped_spans == 10
    assert not [record for record in caplog.records if record.name.startswith("opentelemetry")]


def test_settings_are_ours_unless_the_variables_say_otherwise() -> None:
    """32,768 spans may wait, 2,048 go out together, after a second at most; a batch fits the queue."""
    assert BatchSettings.of({}) == BatchSettings(32_768, 2_048, 1_000)
    environ = {"OTEL_BSP_MAX_QUEUE_SIZE": "1000", "OTEL_BSP_SCHEDULE_DELAY": "20"}
    assert BatchSettings.of(environ) == BatchSettings(1_000, 1_000, 20)
    assert BatchSettings.of({"OTEL_BSP_MAX_EXPORT_BATCH_SIZE": "many"}) == BatchSettings()


class Stuck(SpanExporter):
    """Takes the first batch and is busy with it until it is shut down."""

    def __init__(self) -> None:
        self.batches: list[int] = []
        self.is_shut = False

    def export(self, spans: object) -> SpanExportResult:
        assert isinstance(spans, list)
        self.batches.append(len(spans))
        while not self.is_shut:
            time.sleep(0.005)
        return SpanExportResult.FAILURE

    def shutdown(self) -> None:
        self.is_shut = True


def test_a_full_queue_leaves_spans_out_and_counts_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """No call waits for room, and the buffer is bounded; shutting down gives up after a while."""
    assert trace_export._SHUTDOWN_S == 2.0
    monkeypatch.setattr(trace_export, "_SHUTDOWN_S", _SHUTDOWN_S)
    exporter = Stuck()
    processor = BoundedProcessor(exporter, BatchSettings(max_queue_size=50, max_batch_size=10, delay_ms=10))
    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(processor)
    tracer = provider.get_tracer("test")
    began = time.monotonic()
    for _ in range(1_000):
        tracer.start_span("one").end()
    assert time.monotonic() - began < _FREE_S
    while not exporter.batches:
        time.sleep(0.005)
    assert 1_000 - 50 - 10 <= processor.num_dropped <= 1_000 - 50
    began = time.monotonic()
    provider.shutdown()
    assert _SHUTDOWN_S <= time.monotonic() - began < _SHUTDOWN_S + _SLACK_S
    assert processor.num_dropped == 1_000, "what was queued is lost too"


@pytest.mark.parametrize("illness", ["refuses", "hangs", "is gone"])
def test_an_ill_collector_costs_spans_alone(
    sending: IllReceiver, illness: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Requests are served as ever; spans that did not arrive are counted; shutting down is bounded."""
    if illness == "refuses":
        sending.fail = grpc.StatusCode.INVALID_ARGUMENT
    elif illness == "hangs":
        sending.hang()

    @run_async
    async def scenario() -> None:
        async with stack() as s:
            roots = [gateway.span("chat") for _ in range(20)]
            handles = [await s.gateway.submit([33, 34], trace=telemetry.trace_context(root)) for root in roots]
            for handle, root in zip(handles, roots, strict=True):
                assert len((await s.gateway.end_of(handle)).tokens) == 8
                root.end()

    with monkeypatch.context() as patch:
        if illness == "is gone":
            patch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:9")
        gateway = telemetry.setup("gateway")
        scenario()
    began = time.monotonic()
    gateway.shutdown()
    assert time.monotonic() - began < _SHUTDOWN_S + _SLACK_S
    assert gateway.num_dropped_spans == 20 and not sending.spans()


def test_what_waits_while_the_collector_is_away_arrives_when_it_is_back(sending: IllReceiver) -> None:
    """UNAVAILABLE is tried again within the exporter's timeout."""
    service = telemetry.setup("worker")
    sending.hang()
    service.span("worker.step").end()
    deadline = time.monotonic() + 5
    while not sending.num_calls and time.monotonic() < deadline:
        time.sleep(0.01)
    sending.go_on()
    assert [span.name for span in sending.wait(bool)] == ["worker.step"]
    service.shutdown()
    assert service.num_dropped_spans == 0
