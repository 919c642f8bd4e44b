"""What must hold of each request's trace: its shape, its times, and that its numbers are those of the step log."""

from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import pairwise

from quire.local_stack.otlp_receiver import ReceivedEvent, ReceivedSpan, ReceivedTrace
from svc_common.observability import trace_names as names
from tests.traces.step_index import StepIndex

SERVICES = ("quire-gateway", "quire-scheduler", "quire-worker")
PHASES = (names.QUEUE, names.PREFILL, names.DECODE, names.REQUEUED)
NEXT = {
    names.QUEUE: {names.PREFILL},
    names.PREFILL: {names.DECODE, names.REQUEUED},
    names.DECODE: {names.REQUEUED},
    names.REQUEUED: {names.PREFILL, names.DECODE},
}
"""Which phase may follow which."""
_STEPS_AHEAD = 2
"""Steps of a request that may be planned, and have taken blocks, before the result of its last one that counts."""
_STEPS_LATE = 100
"""What a reader left is over a few steps later, as soon as its gateway's word is there; on a busy machine that takes its time."""


def phases_of(trace: ReceivedTrace) -> list[ReceivedSpan]:
    """The scheduler's spans in order."""
    return sorted((span for span in trace.spans if span.name in PHASES), key=lambda s: (s.start_ns, s.end_ns))


def events_of(spans: Sequence[ReceivedSpan], name: str) -> list[ReceivedEvent]:
    """All of that name, in order."""
    return [event for span in spans for event in span.events if event.name == name]


def check_shape(trace: ReceivedTrace, *, services: Sequence[str] = SERVICES) -> None:
    """One root, the gateway's; every parent is there; each service took part."""
    known = {span.span_id for span in trace.spans}
    roots = [span for span in trace.spans if not span.parent_id]
    assert [(root.service, root.kind) for root in roots] == [("quire-gateway", "SERVER")], trace.trace_id
    assert [span.name for span in trace.spans if span.parent_id and span.parent_id not in known] == []
    assert trace.services == tuple(services), (trace.services, trace.trace_id)


def check_times(trace: ReceivedTrace, log: StepIndex, *, leaves_early: bool) -> None:
    """Children lie within their parents. Only where the reader left do others end some steps behind it."""
    by_id = {span.span_id: span for span in trace.spans}
    for span in trace.spans:
        assert span.start_ns <= span.end_ns
        for event in span.events:
            assert span.start_ns <= event.time_ns <= span.end_ns, (span.name, event.name)
        if span.parent_id:
            parent = by_id[span.parent_id]
            assert parent.start_ns <= span.start_ns, (parent.name, span.name)
            if span.end_ns > parent.end_ns:
                num_steps = log.num_planned(parent.end_ns, span.end_ns)
                assert leaves_early and num_steps <= _STEPS_LATE, (parent.name, span.name, num_steps)


def check_phases(trace: ReceivedTrace) -> None:
    """Queue, prefill, decode and what comes between follow each other without a gap."""
    spans = phases_of(trace)
    assert spans[0].name == names.QUEUE
    for before, after in pairwise(spans):
        assert after.name in NEXT[before.name], [span.name for span in spans]
        assert after.start_ns == before.end_ns, (before.name, after.name)


def check_steps(trace: ReceivedTrace, core_id: str, log: StepIndex, *, is_single: bool) -> Counter[str]:
    """Chunks, preemptions, steps and blocks are those of the step log; what was found, counted."""
    spans, found = phases_of(trace), Counter[str]()
    chunks = events_of(spans, names.CHUNK)
    for chunk in chunks:
        _check_chunk(chunk, log, is_single=is_single)
    assert {chunk.attributes[names.STEP] for chunk in chunks} == log.prefill_steps[core_id], core_id
    preempted = [(e.attributes[names.STEP], e.attributes["quire.mode"]) for e in events_of(spans, names.PREEMPTED)]
    assert preempted == log.preempted[core_id]
    found["chunked"] = any(span.name == names.PREFILL and span.attributes[names.NUM_STEPS] > 1 for span in spans)
    found["preempted"] = len(preempted)
    found["swapped"] = sum(mode == "swap" for _, mode in preempted)
    for span in spans:
        if span.name in (names.PREFILL, names.DECODE):
            _check_stay(span, core_id, log)
    return found


def _check_chunk(chunk: ReceivedEvent, log: StepIndex, *, is_single: bool) -> None:
    numbers = chunk.attributes
    group = log.shares[numbers[names.STEP], numbers[names.SEQUENCE_NAME]]
    if is_single:
        assert (group.tokens, group.computed_before) == (numbers[names.TOKENS], numbers[names.COMPUTED_BEFORE])
    else:
        assert numbers[names.TOKENS] <= group.tokens


def _check_stay(span: ReceivedSpan, core_id: str, log: StepIndex) -> None:
    """A time on a worker: its steps, the epoch and lane they ran in, and its blocks."""
    if not span.attributes[names.NUM_STEPS]:
        return
    first, last = span.attributes[names.FIRST_STEP], span.attributes[names.LAST_STEP]
    steps = log.prefill_steps[core_id] if span.name == names.PREFILL else log.sampled_steps[core_id]
    within = [step for step in steps if first <= step <= last]
    assert len(within) == span.attributes[names.NUM_STEPS], (core_id, span.name, within)
    assert (min(within), max(within)) == (first, last)
    repeated = sum(log.by_step[step].is_repeat for step in within)
    assert repeated == span.attributes.get(names.REPEATED_STEPS, 0), (core_id, span.name)
    report = log.by_step[first]
    assert (report.epoch, report.lane) == (span.attributes[names.EPOCH], span.attributes[names.LANE])
    if log.longest:
        ahead = sorted(step for step in log.planned_steps[core_id] if step > last)[:_STEPS_AHEAD]
        held = {step: count for step, count in log.longest[core_id].items() if first <= step <= last or step in ahead}
        least = max(count for step, count in held.items() if step <= last)
        assert least <= span.attributes[names.BLOCKS_MAX] <= max(held.values()), (core_id, span.name)


def check_decode_steps(trace: ReceivedTrace, core_id: str, log: StepIndex) -> None:
    """Of one sample that ended by itself: each of its steps with tokens is in a decode, ended a prefill, or was late."""
    spans = phases_of(trace)
    decoded = sum(span.attributes[names.NUM_STEPS] for span in spans if span.name == names.DECODE)
    ended_prefills = sum(
        after.name == names.DECODE and before.name == names.PREFILL for before, after in pairwise(spans)
    )
    late = sum(span.attributes.get(names.LATE_TOKENS, 0) for span in spans)
    assert decoded + ended_prefills + late == len(log.sampled_steps[core_id]), core_id


def check_visits(trace: ReceivedTrace, core_id: str, log: StepIndex, *, is_whole: bool) -> None:
    """Each visit to the worker counts the steps that its sequence was scheduled in, and their tokens."""
    visits = trace.named(names.SEQUENCE)
    for visit in visits:
        name, numbers = visit.attributes[names.SEQUENCE_NAME], visit.attributes
        first, last = numbers[names.FIRST_STEP], numbers[names.LAST_STEP]
        assert name.startswith(f"{core_id}/")
        steps = [step for step in log.steps_of[name] if first <= step <= last]
        if is_whole:
            assert numbers[names.NUM_STEPS] == len(steps), name
            sampled = sum(log.num_sampled[step, name] for step in steps)
            assert numbers[names.SAMPLED_TOKENS] >= sampled, name
        assert log.by_step[first].epoch == numbers[names.EPOCH]


def check_moves(traces: Mapping[str, ReceivedTrace], log: StepIndex) -> None:
    """Blocks that spans say were moved are those of the steps, all requests together."""
    for name, pairs_of in ((names.SWAPPED_OUT, "swap_out"), (names.SWAPPED_IN, "swap_in")):
        told = Counter[int]()
        for trace in traces.values():
            for event in events_of(phases_of(trace), name):
                told[event.attributes[names.STEP]] += event.attributes[names.BLOCKS]
        logged = {step: len(getattr(report, pairs_of)) for step, report in log.by_step.items()}
        assert dict(told) == {step: count for step, count in logged.items() if count}, name
