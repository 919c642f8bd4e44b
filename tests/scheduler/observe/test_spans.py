"""Spans of a request in the scheduler, seen by a real OTLP receiver."""

import asyncio
import functools

import pytest

from protos.common.v1 import common_pb2
from protos.inference.v1 import admin_pb2
from quire.local_stack.otlp_receiver import OtlpReceiver, ReceivedSpan
from quire.operators.why import why_json
from svc_common.observability.telemetry import Telemetry, setup, trace_context, trace_id
from tests.support.services.harness import eventually, run_async, stack

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


def phases(otlp: OtlpReceiver, of_trace: str) -> list[ReceivedSpan]:
    """The scheduler's spans of that trace, in order."""
    mine = (s for s in otlp.spans() if s.trace_id == of_trace and s.name.startswith("scheduler."))
    return sorted(mine, key=lambda span: (span.start_ns, span.end_ns))


def test_queue_prefill_decode_in_the_callers_trace(traced: OtlpReceiver) -> None:
    """Three spans one after the other, children of the caller's span like the worker's visit; steps, blocks and usage on them."""
    gateway = setup("gateway")

    @run_async
    async def scenario() -> None:
        root = gateway.span("chat tiny")
        async with stack({"time_scale": 1.0}) as s:
            handle = await s.gateway.submit(PROMPT, max_tokens=10, request_id="r", trace=trace_context(root))
            await s.gateway.end_of(handle)
            root.end()
            names = ("scheduler.queue", "scheduler.prefill", "scheduler.decode", "worker.sequence")
            spans = await spans_of(traced, *names)
        parent = format(root.get_span_context().span_id, "016x")
        assert {spans[name].parent_id for name in names} == {parent}
        assert len({spans[name].trace_id for name in names}) == 1
        queue, prefill, decode, visit = (spans[name] for name in names)
        assert queue.end_ns == prefill.start_ns and prefill.end_ns == decode.start_ns
        assert queue.attributes["gen_ai.usage.input_tokens"] == 40
        assert {prefill.attributes[f"quire.{name}"] for name in ("first_step", "last_step", "steps", "epoch")} == {1}
        [chunk] = [event for event in prefill.events if event.name == "chunk"]
        assert dict(chunk.attributes) == {
            "quire.step": 1,
            "quire.step_id": 1,
            "quire.sequence": "r/0",
            "quire.tokens": 40,
            "quire.computed_before": 0,
        }
        assert decode.attributes["gen_ai.usage.output_tokens"] == 10
        assert [decode.attributes[f"quire.{name}"] for name in ("first_step", "last_step", "steps")] == [2, 10, 9]
        assert prefill.attributes["quire.worker_id"] and prefill.attributes["quire.lane"] == 0
        assert visit.attributes["quire.first_step"] == 1 and visit.attributes["quire.last_step"] == 10
        assert visit.attributes["quire.blocks_max"] == 4 == decode.attributes["quire.blocks_max"]

    scenario()
    gateway.shutdown()


def test_steps_that_were_repeated_by_grants(traced: OtlpReceiver) -> None:
    """The decode counts them, and their spans at the worker say so: those of the step log."""
    gateway = setup("gateway")

    @run_async
    async def scenario() -> None:
        root = gateway.span("chat")
        async with stack({"step_span_interval": 1}, overlap=False) as s:
            handle = await s.gateway.submit(PROMPT, max_tokens=40, request_id="r", trace=trace_context(root))
            await s.gateway.end_of(handle)
            await spans_of(traced, "worker.sequence", "scheduler.decode")
            repeated = {report.step for report in await s.admin.steps() if report.is_repeat}
        decode = phases(traced, trace_id(root))[-1]
        assert decode.attributes["quire.repeated_steps"] == len(repeated) > 20
        steps = [span.attributes for span in traced.spans() if span.name == "worker.step"]
        assert {own["quire.step"] for own in steps if own["quire.step.is_repeat"]} == repeated
        assert len(steps) > len(repeated)

    scenario()
    gateway.shutdown()


def test_a_long_prompt_shows_its_chunks(traced: OtlpReceiver) -> None:
    """R88: one event for each chunk, with what the step log has."""
    gateway = setup("gateway")

    @run_async
    async def scenario() -> None:
        root = gateway.span("chat")
        async with stack(max_num_batched_tokens=32) as s:
            handle = await s.gateway.submit([*PROMPT, *PROMPT], max_tokens=1, request_id="r", trace=trace_context(root))
            await s.gateway.end_of(handle)
            shares = [
                (report.step, g.tokens, g.computed_before) for report in await s.admin.steps() for g in report.scheduled
            ]
        [_, prefill, decode] = phases(traced, trace_id(root))
        keys = ("quire.step", "quire.tokens", "quire.computed_before")
        assert [tuple(e.attributes[k] for k in keys) for e in prefill.events if e.name == "chunk"] == shares
        assert len(shares) == 3 == prefill.attributes["quire.steps"] and decode.attributes["quire.steps"] == 0

    scenario()
    gateway.shutdown()


@pytest.mark.parametrize(
    ("policy", "sets", "mode"),
    [("quire", ["restraint=null"], "recompute"), ("vllm-v0", ["preemption_mode=swap"], "swap")],
)
def test_a_preempted_request_shows_why_and_how_it_returned(
    traced: OtlpReceiver, policy: str, sets: list[str], mode: str
) -> None:
    """R27, R76-R78: what interrupted a decode, a span of waiting again with its reasons, and the way back."""
    gateway = setup("gateway")

    @run_async
    async def scenario() -> None:
        roots = [gateway.span(f"chat {i}") for i in range(3)]
        async with stack({"num_gpu_blocks": 9}, policy=policy, policy_set=sets, max_num_seqs=4) as s:
            handles = [
                await s.gateway.submit([33 + i, *PROMPT[:20]], max_tokens=40, trace=trace_context(root))
                for i, root in enumerate(roots)
            ]
            for handle in handles:
                await s.gateway.end_of(handle)
            preempted = [(report.step, p.mode) for report in await s.admin.steps() for p in report.preempted]
        for root in roots:
            root.end()
        spans = [phases(traced, trace_id(root)) for root in roots]
        events = [e for of_one in spans for span in of_one for e in span.events if e.name == "preempted"]
        assert sorted((e.attributes["quire.step"], e.attributes["quire.mode"]) for e in events) == preempted
        assert {mode} == {name for _, name in preempted}
        away = [
            (of_one[i], of_one[i + 1]) for of_one in spans for i, s in enumerate(of_one) if s.name.endswith("requeued")
        ]
        assert len(away) == len(preempted)
        for waiting, back in away:
            assert (waiting.attributes["quire.reason"], waiting.attributes["quire.mode"]) == ("PREEMPTED", mode)
            assert waiting.events[0].name == "PREEMPTED" and waiting.end_ns == back.start_ns
            assert back.name == ("scheduler.decode" if mode == "swap" else "scheduler.prefill")
            assert [e.name for e in back.events].count("swapped_in") == (mode == "swap")
            assert back.attributes["quire.recomputes"] == (mode == "recompute")

    scenario()
    gateway.shutdown()


def told(span: ReceivedSpan) -> list[tuple[str, int, dict[str, object]]]:
    """Reasons to wait on a span: name, step, numbers."""
    skipped = ("quire.step", "quire.queue")
    found = (e for e in span.events if e.name.isupper())
    return [
        (
            e.name,
            e.attributes["quire.step"],
            {k.removeprefix("quire."): v for k, v in e.attributes.items() if k not in skipped},
        )
        for e in found
    ]


def test_reasons_are_those_of_quire_why(traced: OtlpReceiver) -> None:
    """Of the head and of those behind it, with their numbers, whether they were looked at or not."""
    gateway = setup("gateway")

    @run_async
    async def scenario() -> None:
        roots = {name: gateway.span(f"chat {name}") for name in "abcd"}
        async with stack({"time_scale": 1.0, "step_base_s": 0.002, "num_gpu_blocks": 12}, max_num_seqs=2) as s:
            handles = [
                await s.gateway.submit(PROMPT, max_tokens=20, request_id=name, trace=trace_context(root))
                for name, root in roots.items()
            ]
            for handle in handles:
                await s.gateway.end_of(handle)
            request = admin_pb2.ExplainRequestRequest
            why = {name: why_json(await s.admin.stub.ExplainRequest(request(request_id=name))) for name in roots}
        for name, root in roots.items():
            waits = [e for e in why[name]["episodes"] if e["queue"] == "waiting"]
            expected = [(e["reason"], e["from_step"], e["numbers"]) for e in waits]
            assert told(phases(traced, trace_id(root))[0]) == expected, name
            root.end()
        reasons = {e["reason"] for name in roots for e in why[name]["episodes"]}
        assert {"ARRIVED", "MAX_SEQS", "BEHIND"} <= reasons

    scenario()
    gateway.shutdown()


async def _ends(otlp: OtlpReceiver, gateway: Telemetry) -> dict[str, ReceivedSpan]:
    """Last phases of requests that ended early, by what was to become of them."""
    names = ("cancelled", "expired", "too long", "unknown token", "refused")
    roots = {name: gateway.span(name) for name in names}
    contexts = {name: trace_context(root) for name, root in roots.items()}
    slow = {"time_scale": 1.0, "step_base_s": 0.01, "num_gpu_blocks": 30}
    async with stack(slow, max_num_seqs=1, max_waiting_requests=1) as s:
        running = await s.gateway.submit(PROMPT, max_tokens=400, trace=contexts["cancelled"])
        await s.gateway.tokens_of(running, 2)
        for prompt, name in (([400], "unknown token"), (PROMPT * 40, "too long")):
            await s.gateway.end_of(await s.gateway.submit(prompt, trace=contexts[name]))
        late = s.gateway.make_submit(PROMPT, trace=contexts["expired"], remaining_ns=300_000_000)
        refused = s.gateway.make_submit(PROMPT, trace=contexts["refused"])
        await s.gateway.send(submits=[late, refused])
        await s.gateway.end_of(refused.handle)
        await s.gateway.end_of(late.handle)
        await s.gateway.send(cancels=[{"handle": running}])
        await s.gateway.end_of(running)
    found = {}
    for name, root in roots.items():
        root.end()
        found[name] = phases(otlp, trace_id(root))[-1]
    return found


def test_every_early_end_has_its_event_and_error_type(traced: OtlpReceiver) -> None:
    """R23, R35, P6: cancelled, expired, refused and what can never be served; only faults of ours are marked as errors."""
    gateway, found = setup("gateway"), {}

    @run_async
    async def scenario() -> None:
        found.update(await _ends(traced, gateway))

    scenario()
    gateway.shutdown()
    expected = {
        "cancelled": ("scheduler.decode", "cancelled", "CANCELLED", "UNSET"),
        "expired": ("scheduler.queue", "expired", "EXPIRED_IN_QUEUE", "ERROR"),
        "too long": ("scheduler.queue", "failed", "PROMPT_TOO_LONG", "UNSET"),
        "unknown token": ("scheduler.queue", "failed", "INVALID_FIELD", "UNSET"),
        "refused": ("scheduler.admit", "refused", "QUEUE_FULL", "ERROR"),
    }
    got = {n: (s.name, s.events[-1].name, s.attributes["error.type"], s.status) for n, s in found.items()}
    assert got == expected
    assert found["refused"].events[0].attributes["quire.waiting_requests"] == 1
    assert found["refused"].events[0].attributes["quire.retry_after_s"] > 0


def test_unsampled_and_untraced_requests_have_no_spans(traced: OtlpReceiver) -> None:
    """No span is made for them: neither in the scheduler nor, by the context it passes on, in the worker."""

    @run_async
    async def scenario() -> None:
        async with stack() as s:
            unsampled = common_pb2.TraceContext(traceparent=NOT_SAMPLED)
            for context in (unsampled, common_pb2.TraceContext()):
                await s.gateway.end_of(await s.gateway.submit(PROMPT, trace=context))
            await eventually(lambda: True, "done")

    scenario()
    assert not [span for span in traced.spans() if span.name.startswith(("scheduler.", "worker.sequence"))]
