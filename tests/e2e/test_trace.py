"""One request is one trace over three services (R12)."""

import os

from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider

from quire import SamplingParams
from quire.client.sync_client import Client
from quire.local_stack.otlp_receiver import OtlpReceiver
from quire.local_stack.stack import LocalStack
from tests.support.tracing_page import undocumented

_NEEDED = {"scheduler.queue", "scheduler.prefill", "scheduler.decode", "worker.sequence"}
_SECRET = "canary-7f3a"


def test_the_clients_trace_runs_through_gateway_scheduler_and_worker(otlp: OtlpReceiver) -> None:
    """W3C context from the client; queue, prefill, decode and sequence spans; step spans that link; no orphan, no content."""
    tracer = TracerProvider().get_tracer("client")
    environ = {**os.environ, **otlp.environ()}
    params = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)
    with (
        LocalStack(simulated=True, environ=environ) as stack,
        Client(stack.grpc_address) as client,
        tracer.start_as_current_span("client") as span,
    ):
        stream = client.generate_stream(f"def {_SECRET}", params)
        stream.read()
        mine = trace.format_trace_id(span.get_span_context().trace_id)
        assert stream.trace_id == mine
    spans = [s for s in otlp.spans() if s.trace_id == mine]
    assert {s.service for s in spans} == {"quire-gateway", "quire-scheduler", "quire-worker"}
    assert {s.name for s in spans} >= _NEEDED
    ids = {s.span_id for s in spans}
    outside = [s for s in spans if s.parent_id not in ids]
    assert [s.service for s in outside] == ["quire-gateway"], "one root, the rest below it"
    step_spans = [s for s in otlp.spans() if s.name == "worker.step"]
    assert any(link.trace_id == mine for s in step_spans for link in s.links)
    assert all(s.trace_id != mine for s in step_spans), "steps have traces of their own"
    text = repr([(s.name, dict(s.attributes), s.events) for s in otlp.spans()])
    assert _SECRET not in text
    assert undocumented(otlp.spans()) == []
