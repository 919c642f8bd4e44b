"""The OTLP receiver sees exactly what services export."""

import os

import grpc
import pytest
from opentelemetry.trace import SpanKind, StatusCode

from quire.local_stack.otlp_receiver import OtlpReceiver
from svc_common.net import rpc
from svc_common.observability import telemetry
from tests.support.orphans import orphans


@pytest.fixture
def exporting(otlp: OtlpReceiver, monkeypatch: pytest.MonkeyPatch) -> OtlpReceiver:
    """This process' telemetry points at the receiver."""
    for key in [key for key in os.environ if key.startswith("OTEL_")]:
        monkeypatch.delenv(key)
    for key, value in otlp.environ().items():
        monkeypatch.setenv(key, value)
    return otlp


def test_spans_of_three_services_form_one_tree(exporting: OtlpReceiver) -> None:
    """Context handed on in messages gives one trace id, three services, no orphan, and the tree in order."""
    gateway, scheduler, worker = (telemetry.setup(name) for name in ("gateway", "scheduler", "worker"))
    request = gateway.span("request", kind=SpanKind.SERVER, attributes={"gen_ai.request.model": "tiny", "ids": [1, 2]})
    queue = scheduler.span("queue", parent=telemetry.context_of(telemetry.trace_context(request)))
    queue.add_event("NEED_BLOCKS", {"need": 12, "free": 9})
    visit = worker.span("worker.sequence", parent=telemetry.context_of(telemetry.trace_context(queue)))
    step = worker.span("worker.step", links=telemetry.step_links([telemetry.trace_context(request)]))
    step.set_status(StatusCode.ERROR, "NaN logits")
    for span in (step, visit, queue, request):
        span.end()
    for service in (gateway, scheduler, worker):
        service.shutdown()

    spans = exporting.wait(lambda spans: len(spans) == 4, timeout_s=5)
    traces = exporting.traces()
    tree = traces[telemetry.trace_id(request)]
    assert len(traces) == 2, "the step is in a trace of its own"
    assert tree.services == ("quire-gateway", "quire-scheduler", "quire-worker")
    assert [(depth, span.name) for depth, span in tree.walk()] == [(0, "request"), (1, "queue"), (2, "worker.sequence")]
    assert orphans(exporting) == []
    by_name = {span.name: span for span in spans}
    assert by_name["request"].attributes == {"gen_ai.request.model": "tiny", "ids": (1, 2)}
    assert by_name["request"].kind == "SERVER"
    assert [(e.name, e.attributes) for e in by_name["queue"].events] == [("NEED_BLOCKS", {"need": 12, "free": 9})]
    assert [link.trace_id for link in by_name["worker.step"].links] == [tree.trace_id]
    assert (by_name["worker.step"].status, by_name["worker.step"].status_message) == ("ERROR", "NaN logits")
    assert by_name["request"].duration_s > 0


def test_a_span_whose_parent_never_came_is_an_orphan(exporting: OtlpReceiver) -> None:
    """A remote parent is an orphan unless the caller knows it (a client's own span)."""
    parent = "00f067aa0ba902b7"
    context = telemetry.context_of({"traceparent": f"00-4bf92f3577b34da6a3ce929d0e0e4736-{parent}-01"})
    service = telemetry.setup("gateway")
    service.span("request", parent=context).end()
    service.shutdown()

    exporting.wait(lambda spans: len(spans) == 1, timeout_s=5)
    assert [span.name for span in orphans(exporting)] == ["request"]
    assert orphans(exporting, known_parents={parent}) == []


def test_wait_says_what_did_arrive(exporting: OtlpReceiver) -> None:
    """A predicate that never holds is a TimeoutError with the spans seen."""
    service = telemetry.setup("worker")
    service.span("worker.step").end()
    service.shutdown()
    exporting.wait(bool, timeout_s=5)
    with pytest.raises(TimeoutError, match=r"received: quire-worker/worker\.step"):
        exporting.wait(lambda spans: len(spans) > 1, timeout_s=0.05)


def test_spans_beyond_the_limit_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """A receiver never grows without bound."""
    with OtlpReceiver(max_spans=2) as receiver:
        for key, value in receiver.environ().items():
            monkeypatch.setenv(key, value)
        service = telemetry.setup("worker")
        for _ in range(5):
            service.span("worker.step").end()
        service.shutdown()
        assert (len(receiver.spans()), receiver.num_dropped) == (2, 3)


async def _ping(port: int) -> grpc.StatusCode:
    async with rpc.channel(f"127.0.0.1:{port}") as channel:
        try:
            await channel.unary_unary("/none/None")(b"", timeout=5)
        except grpc.aio.AioRpcError as error:
            return error.code()
    return grpc.StatusCode.OK


def test_it_lives_beside_our_own_servers(otlp: OtlpReceiver) -> None:
    """Its threads do not disturb an event loop with a grpc.aio server in the same process."""
    import asyncio

    async def scenario() -> grpc.StatusCode:
        server = rpc.server()
        port = rpc.bind(server, "127.0.0.1", 0, option="--port")
        await server.start()
        try:
            return await _ping(port)
        finally:
            await server.stop(0)

    assert asyncio.run(scenario()) is grpc.StatusCode.UNIMPLEMENTED
