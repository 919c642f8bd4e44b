"""Spans of a request in the scheduler, seen by a real OTLP receiver (design.md 9)."""

import asyncio
import functools

import pytest

from protos.common.v1 import common_pb2
from quire.otlp_receiver import OtlpReceiver, ReceivedSpan
from svc_common.telemetry import setup, trace_context
from tests.scheduler.harness import run_async, stack

PROMPT = list(range(32, 72))
NOT_SAMPLED = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-00"


@pytest.fixture
def traced(otlp: OtlpReceiver, monkeypatch: pytest.MonkeyPatch) -> OtlpReceiver:
    """Services started now export to the receiver."""
    for name, value in otlp.environ().items():
        monkeypatch.setenv(name, value)
    return otlp


async def spans_of(otlp: OtlpReceiver, *names: str) -> dict[str, ReceivedSpan]:
    """Waits for spans of these names."""
    found = await asyncio.to_thread(
        functools.partial(otlp.wait, lambda spans: set(names) <= {span.name for span in spans})
    )
    return {span.name: span for span in found}


def test_queue_prefill_decode_in_the_callers_trace(traced: OtlpReceiver) -> None:
    """Three spans one after the other, children of the caller's span like the worker's visit; step numbers and usage on them."""
    gateway = setup("gateway")

    @run_async
    async def scenario() -> None:
        root = gateway.span("chat tiny")
        async with stack({"time_scale": 1.0}) as s:
            handle = await s.gateway.submit(PROMPT, max_tokens=6, request_id="r", trace=trace_context(root))
            await s.gateway.end_of(handle)
            root.end()
            names = ("scheduler.queue", "scheduler.prefill", "scheduler.decode", "worker.sequence")
            spans = await spans_of(traced, *names)
        parent = format(root.get_span_context().span_id, "016x")
        assert {spans[name].parent_id for name in names} == {parent}
        assert len({spans[name].trace_id for name in names}) == 1
        queue, prefill, decode = (spans[name] for name in names[:3])
        assert queue.end_ns <= prefill.start_ns + 1_000_000 and prefill.end_ns <= decode.start_ns + 1_000_000
        assert prefill.attributes["quire.first_step"] == 1 and prefill.attributes["quire.last_step"] == 1
        assert decode.attributes["gen_ai.usage.output_tokens"] == 6
        assert decode.attributes["gen_ai.usage.input_tokens"] == 40
        assert decode.attributes["quire.last_step"] == 6

    scenario()
    gateway.shutdown()


def test_preemptions_and_failures_are_on_the_spans(traced: OtlpReceiver) -> None:
    """A preempted request's decode span has the events; one that fails has the status and the reason."""
    gateway = setup("gateway")

    @run_async
    async def scenario() -> None:
        async with stack({"num_gpu_blocks": 9}, max_num_seqs=4) as s:
            roots = [gateway.span(f"chat {i}") for i in range(3)]
            handles = [
                await s.gateway.submit([33 + i, *PROMPT[:20]], max_tokens=40, trace=trace_context(root))
                for i, root in enumerate(roots)
            ]
            accounts = [(await s.gateway.end_of(h)).finished.account for h in handles]
            assert any(a.num_preemptions for a in accounts)
            bad = await s.gateway.submit([400], trace=trace_context(roots[0]))
            await s.gateway.end_of(bad)
            for root in roots:
                root.end()
            await spans_of(traced, "chat 2")
            await asyncio.to_thread(
                functools.partial(traced.wait, lambda spans: any("error.type" in s.attributes for s in spans))
            )
        spans = traced.spans()
        events = [event.name for span in spans if span.name == "scheduler.decode" for event in span.events]
        assert "preempted" in events and events.count("preempted") == events.count("resumed")
        [failed] = [span for span in spans if "error.type" in span.attributes]
        assert failed.name == "scheduler.queue" and failed.attributes["error.type"] == "INVALID_FIELD"

    scenario()
    gateway.shutdown()


def test_unsampled_and_untraced_requests_have_no_spans(traced: OtlpReceiver) -> None:
    """No span is made for them: neither in the scheduler nor, by the context it passes on, in the worker."""

    @run_async
    async def scenario() -> None:
        async with stack() as s:
            unsampled = common_pb2.TraceContext(traceparent=NOT_SAMPLED)
            for context in (unsampled, common_pb2.TraceContext()):
                await s.gateway.end_of(await s.gateway.submit(PROMPT, trace=context))

    scenario()
    assert not [span for span in traced.spans() if span.name.startswith(("scheduler.", "worker.sequence"))]
