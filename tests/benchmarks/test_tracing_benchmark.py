"""The benchmark of what traces cost: its arithmetic, its collector, and a small run through real processes."""

import socket

import grpc
import pytest
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc
from opentelemetry.proto.trace.v1 import trace_pb2

from benchmarks.open_load import Flow
from benchmarks.tracing import __main__ as tracing
from benchmarks.tracing.sink import Sink, unused_port


def _message(num_spans: int) -> trace_service_pb2.ExportTraceServiceRequest:
    spans = [trace_pb2.Span(name="one") for _ in range(num_spans)]
    scopes = [trace_pb2.ScopeSpans(spans=spans)]
    return trace_service_pb2.ExportTraceServiceRequest(resource_spans=[trace_pb2.ResourceSpans(scope_spans=scopes)])


def test_the_sink_counts_spans_and_may_hang() -> None:
    """What arrived since the last look; no caller waits for a service that hangs."""
    with Sink() as sink, grpc.insecure_channel(f"127.0.0.1:{sink.port}") as channel:
        stub = trace_service_pb2_grpc.TraceServiceStub(channel)
        stub.Export(_message(3), timeout=10)
        stub.Export(_message(4), timeout=10)
        assert sink.take_figures()["spans"] == 7
        assert sink.take_figures() == {"spans": 0, "bytes": 0}
    with Sink(hangs=True) as sink, grpc.insecure_channel(f"127.0.0.1:{sink.port}") as channel:
        with pytest.raises(grpc.RpcError) as caught:
            trace_service_pb2_grpc.TraceServiceStub(channel).Export(_message(1), timeout=0.3)
        assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED


def test_without_a_listener_there() -> None:
    """A connection is refused."""
    with unused_port() as port, socket.socket() as client:
        assert client.connect_ex(("127.0.0.1", port)) != 0


def test_a_spread_is_of_the_ratios() -> None:
    """Median, least and most."""
    assert tracing._spread([0.98, 1.02, 0.99]) == {"median": 0.99, "least": 0.98, "most": 1.02}


@pytest.mark.long
def test_a_small_run() -> None:
    """Every request of the traced stack has its spans, of the others none or few; nothing fails with an ill collector."""
    flow = Flow("all", 0.0, prompt=8, output=4, num_clients=2)
    found = tracing.throughput("simulated", flow, 1.0, 1)
    assert found["spans_per_request"]["100 %"] >= 5 > found["spans_per_request"]["1 %"]
    assert found["spans_per_request"]["off"] == found["spans_per_request"]["off again"] == 0
    sick = tracing.ill("simulated", Flow("all", 10.0, prompt=8, output=4), 1.0)
    assert set(sick) == {"off", "dead", "hung"} and all(values["ttft_p50_s"] > 0 for values in sick.values())
