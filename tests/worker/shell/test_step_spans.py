"""Spans of the worker: sequences in the requests' traces, steps in their own, linked."""

from collections.abc import Sequence

import pytest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import NoOpTracerProvider

from protos.common.v1 import common_pb2
from protos.worker.v1 import worker_pb2
from quire_tools.simulated_worker.engine import SimulatedEngine
from svc_common.errors import Internal, QuireError
from svc_common.net import rpc
from svc_common.observability.telemetry import MAX_STEP_LINKS, Telemetry, context_of, trace_context
from tests.support.worker.builders import Change, Row, step
from tests.support.worker.running import fast
from worker_svc.shell.step_spans import StepClock, StepSpans


class Traced:
    """An engine whose steps are told to StepSpans, as `OwnedSteps` does."""

    def __init__(self, interval: int = 1_000) -> None:
        self.exporter = InMemorySpanExporter()
        provider = TracerProvider()
        provider.add_span_processor(SimpleSpanProcessor(self.exporter))
        self.telemetry = Telemetry(provider, enabled=True)
        self.now_s = 0.0
        self.spans = StepSpans(self.telemetry, interval=interval, clock=lambda: self.now_s)
        self.engine = SimulatedEngine(fast())
        self.engine.allocate(64, 16)
        self.step_id = 0

    def request(self) -> common_pb2.TraceContext:
        span = self.telemetry.span("request")
        return trace_context(span)

    def run(self, **changes: object) -> None:
        self.step_id += 1
        message = step(self.step_id, **changes)
        try:
            result = self.engine.execute(message)
        except QuireError as error:
            result = worker_pb2.WorkerOutputs(error=rpc.to_error_status(error))
        self.spans.step(message, result, StepClock(1_000 * self.step_id, 1_000 * self.step_id + 500))

    def finished(self, name: str) -> Sequence[ReadableSpan]:
        return [span for span in self.exporter.get_finished_spans() if span.name == name]


def test_sequence_span_covers_the_visit_and_is_a_child_of_the_request() -> None:
    traced = Traced()
    trace = traced.request()
    traced.run(add=[Row(0, [1, 2, 3, 4, 5], [0, 1, 2], 3, trace=trace, num_prompt=4)])
    traced.run(change=[Change(0, 2)])
    traced.run()
    traced.run(remove=[0])
    [span] = traced.finished("worker.sequence")
    parent = span.parent
    assert parent is not None
    assert f"{parent.trace_id:032x}-{parent.span_id:016x}" in trace.traceparent
    assert (span.start_time, span.end_time) == (1_000, 3_500), "to the end of the last step that computed any of it"
    expected = {"first_step_id": 1, "last_step_id": 3, "steps": 3, "sampled_tokens": 2, "prompt_tokens": 4, "row": 0}
    expected["blocks_max"] = 3
    assert {key: span.attributes[f"quire.{key}"] for key in expected} == expected
    assert span.attributes["quire.sequence"] == "r0/0"
    assert traced.spans.num_open == 0


def test_steps_in_which_traced_sequences_join_or_leave_are_linked_to_them() -> None:
    traced = Traced()
    trace = traced.request()
    traced.run(add=[Row(0, [1, 2], [0, 1], 2, trace=trace), Row(1, [3], [2], 1, trace=common_pb2.TraceContext())])
    traced.run()
    traced.run(remove=[0])
    joining, leaving = traced.finished("worker.step")
    assert (joining.attributes["quire.step_id"], leaving.attributes["quire.step_id"]) == (1, 3)
    for span in (joining, leaving):
        assert span.parent is None, "a trace of its own"
        assert [f"{link.context.trace_id:032x}" for link in span.links] == [trace.traceparent.split("-")[1]]
        assert f"{span.context.trace_id:032x}" not in trace.traceparent
    assert joining.attributes["quire.step.computed_tokens"] == 3
    assert joining.attributes["quire.step.sampled_tokens"] == 2
    assert joining.attributes["quire.step.rows_joined"] == 2
    assert leaving.attributes["quire.step.rows_left"] == 1
    assert "quire.step.model_ns" in joining.attributes


def test_one_step_in_interval_has_a_span() -> None:
    traced = Traced(interval=10)
    traced.run(add=[Row(0, [1], range(20), 1)])
    for _ in range(29):
        traced.run()
    assert [span.attributes["quire.step_id"] for span in traced.finished("worker.step")] == [10, 20, 30]


def test_steps_that_take_longer_than_almost_all_have_a_span() -> None:
    """Beyond the 99th percentile of those before, once there are a hundred."""
    traced = Traced(interval=10_000)

    def run(duration_ns: int) -> None:
        traced.step_id += 1
        message = step(traced.step_id, add=[Row(0, [1], range(60), 1)] if traced.step_id == 1 else ())
        start_ns = 10_000 * traced.step_id
        traced.spans.step(message, traced.engine.execute(message), StepClock(start_ns, start_ns + duration_ns))

    for i in range(99):
        run(9_000 if i == 50 else 500 + i)
    assert traced.finished("worker.step") == [], "nothing to compare with yet"
    for duration_ns in (500, 590, 9_001, 598):
        run(duration_ns)
    [slow] = traced.finished("worker.step")
    assert slow.attributes["quire.step_id"] == 102 and slow.attributes["quire.step.cause"] == "slow"


def test_only_some_comings_a_second_have_a_span_of_their_step() -> None:
    """At a thousand requests a second two spans more for each would be too many."""
    traced = Traced()
    for i in range(12):
        traced.run(add=[Row(i, [1], range(5 * i, 5 * i + 5), 1, trace=traced.request())])
    assert len(traced.finished("worker.step")) == 10
    traced.now_s = 0.2
    for i in range(5):
        traced.run(remove=[i])
    assert [span.attributes["quire.step_id"] for span in traced.finished("worker.step")][10:] == [13, 14]
    assert {span.attributes["quire.step.cause"] for span in traced.finished("worker.step")} == {"joins_or_leaves"}
    assert len(traced.finished("worker.sequence")) == 5, "their own spans have no limit"


def test_step_with_a_context_of_its_own_joins_that_trace() -> None:
    traced = Traced()
    trace = traced.request()
    message = step(1, add=[Row(0, [1], [0], 1)])
    message.trace.CopyFrom(trace)
    traced.spans.step(message, traced.engine.execute(message), StepClock(1, 2))
    [span] = traced.finished("worker.step")
    assert f"{span.context.trace_id:032x}" in trace.traceparent


def test_links_are_at_most_32() -> None:
    """The SDK silently drops links past 128; ours have at most 32."""
    traced = Traced()
    traced.run(add=[Row(i, [1], [i], 1, trace=traced.request()) for i in range(40)])
    [span] = traced.finished("worker.step")
    assert len(span.links) == MAX_STEP_LINKS == 32


def test_refused_step_has_a_span_and_opens_no_visit() -> None:
    traced = Traced()
    traced.run(add=[Row(0, [1] * 9, [0], 9, trace=traced.request())])
    [span] = traced.finished("worker.step")
    assert not span.status.is_ok
    assert span.attributes["error.type"] == "INVALID_FIELD"
    assert traced.spans.num_open == 0


def test_failed_step_changed_its_rows_so_visits_open_and_close() -> None:
    traced = Traced()
    error = worker_pb2.WorkerOutputs(error=rpc.to_error_status(Internal("a bug")))
    traced.spans.step(step(1, add=[Row(0, [1], [0], 1, trace=traced.request())]), error, StepClock(1, 2))
    assert traced.spans.num_open == 1
    traced.spans.step(step(2, remove=[0]), error, StepClock(3, 4))
    assert traced.spans.num_open == 0
    assert [span.status.is_ok for span in traced.finished("worker.step")] == [False, False]


def test_end_of_the_epoch_ends_open_visits() -> None:
    traced = Traced()
    traced.run(add=[Row(0, [1], [0], 1, trace=traced.request())])
    traced.spans.end_all("epoch over")
    [span] = traced.finished("worker.sequence")
    assert span.attributes["quire.ended_by"] == "epoch over"
    assert traced.spans.num_open == 0


def test_unsampled_requests_open_nothing_and_are_not_linked() -> None:
    traced = Traced(interval=1)
    trace = common_pb2.TraceContext(traceparent="00-" + "a" * 32 + "-" + "b" * 16 + "-00")
    assert context_of(trace) is not None
    traced.run(add=[Row(0, [1], [0], 1, trace=trace)])
    assert traced.spans.num_open == 0
    [span] = traced.finished("worker.step")
    assert not span.links


@pytest.mark.parametrize("traceparent", ["", "garbage", "00-" + "0" * 32 + "-" + "b" * 16 + "-01"])
def test_context_that_is_none_is_ignored(traceparent: str) -> None:
    traced = Traced()
    traced.run(add=[Row(0, [1], [0], 1, trace=common_pb2.TraceContext(traceparent=traceparent, tracestate="a=b"))])
    assert traced.spans.num_open == 0


def test_nothing_is_read_while_traces_are_off() -> None:
    spans = StepSpans(Telemetry(NoOpTracerProvider(), enabled=False), interval=1)
    broken = worker_pb2.SchedulerOutputs(step_id=1, removed_rows=b"\1")
    spans.step(broken, worker_pb2.WorkerOutputs(), StepClock(1, 2))
    assert spans.num_open == 0
