"""A trace of every request, whatever became of it, over all three services; its numbers are the step log's.

Under two policies: one that recomputes preempted requests and one that swaps them.
"""

from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from quire.local_stack.otlp_receiver import OtlpReceiver, ReceivedTrace
from svc_common.observability import trace_names as names
from tests.support.orphans import orphans
from tests.support.tracing_page import undocumented
from tests.traces import checks
from tests.traces.asks import CLIENTS_OWN, Ask, asks
from tests.traces.coverage import STAGES
from tests.traces.serving import Ran, exporting, run_apart, run_here, tenants_file
from tests.traces.step_index import StepIndex

_STEP_S = 0.002
POLICIES = {"quire": ["restraint=null", "preemption_mode=recompute"], "vllm-v0": ["preemption_mode=swap"]}
NUM_AT_ONCE = 24
MOST_ROUNDS = 5
"""Of the same requests under one policy, until one is preempted: where clients are slow, few requests run at the same time."""
_WORKER = {"max_model_len": 512, "num_gpu_blocks": 33, "num_cpu_blocks": 400, "step_base_s": _STEP_S, "time_scale": 1.0}
_BUDGET = {"quire": 64, "vllm-v0": 512}


def _here(policy: str, wanted: list[Ask], tenants: Path) -> Ran:
    scheduling = {"policy": policy, "policy_set": POLICIES[policy], "max_num_seqs": 16}
    scheduling |= {"max_num_batched_tokens": _BUDGET[policy]}
    return run_here(wanted, _WORKER, scheduling, tenants, NUM_AT_ONCE)


def _apart(policy: str, wanted: list[Ask], tenants: Path) -> Ran:
    worker = [part for name, value in _WORKER.items() for part in (f"--{name.replace('_', '-')}", str(value))]
    sets = [part for text in POLICIES[policy] for part in ("--set", text)]
    limits = ["--max-num-seqs", "16", "--max-num-batched-tokens", str(_BUDGET[policy])]
    return run_apart(wanted, worker, ["--policy", policy, *sets, *limits], tenants, NUM_AT_ONCE)


def _by_request(otlp: OtlpReceiver) -> dict[str, ReceivedTrace]:
    """Traces of requests, by public id."""
    found: dict[str, ReceivedTrace] = {}
    for trace in otlp.traces().values():
        for span in trace.spans:
            if span.kind == "SERVER":
                assert span.attributes[names.REQUEST_ID] not in found, "one root each"
                found[span.attributes[names.REQUEST_ID]] = trace
    return found


def _check(wanted: list[Ask], ran: Ran, otlp: OtlpReceiver) -> Counter[str]:
    """Every request; what was seen, counted."""
    log, traces, seen = StepIndex(ran[1]), _by_request(otlp), Counter[str]()
    never_came = {ask.request_id for ask in wanted if ask.end == CLIENTS_OWN} - set(traces)
    assert set(traces) == {ask.request_id for ask in wanted} - never_came and not otlp.num_dropped
    assert orphans(otlp) == []
    for ask in wanted:
        if ask.request_id in traces:
            seen += _check_one(ask, traces[ask.request_id], log)
    checks.check_moves(traces, log)
    assert undocumented(otlp.spans()) == []
    _check_step_spans(otlp, log)
    return seen


def _check_one(ask: Ask, trace: ReceivedTrace, log: StepIndex) -> Counter[str]:
    ran = bool(log.steps_of[f"{ask.core_id}/0"])
    reached = ran or any(span.name == names.QUEUE for span in trace.spans)
    came = reached or any(span.name == names.ADMIT for span in trace.spans)
    checks.check_shape(trace, services=checks.SERVICES[: 3 if ran else 2 if came else 1])
    checks.check_times(trace, log, leaves_early=ask.leaves_early)
    seen = Counter({f"{ask.kind}: {'served' if ask.end == '' else ask.end or 'left'}": 1})
    if reached:
        checks.check_phases(trace)
        seen += checks.check_steps(trace, ask.core_id, log, is_single=ask.is_single)
        is_whole = ask.end == ""
        checks.check_visits(trace, ask.core_id, log, is_whole=is_whole)
        if is_whole and ask.is_single:
            checks.check_decode_steps(trace, ask.core_id, log)
    _check_end(ask, trace)
    return seen


def _check_end(ask: Ask, trace: ReceivedTrace) -> None:
    """What ended it is an event of its root, and of its last phase."""
    [root] = trace.roots
    told, error = (
        [event.name for event in root.events if event.name not in STAGES],
        root.attributes.get(names.ERROR_TYPE, ""),
    )
    phases = checks.phases_of(trace)
    last = [event.name for event in phases[-1].events] if phases else []
    if ask.end not in (None, CLIENTS_OWN):
        assert error == ask.end
    if ask.end == "":
        assert told == [] and not {names.CANCELLED, names.EXPIRED, names.FAILED} & set(last)
    elif ask.end is None and any(names.FINISH_REASONS in span.attributes for span in trace.spans):
        assert (told, error) == ([], "")  # its last token was made before the cancel came
    elif ask.end is None:
        assert (told, error) == ([names.CANCELLED], "CLIENT_GONE")
        # The scheduler may have made the last token before it heard that the client is gone.
        was_complete = phases[-1].attributes.get(names.OUTPUT_TOKENS) == ask.message().stop.max_tokens
        assert was_complete or last[-1] == names.CANCELLED
    elif ask.end == CLIENTS_OWN:
        assert told in ([names.CANCELLED], [names.EXPIRED]), ask.kind
    elif ask.leaves_early:
        # A deadline that passes before there is a model gets the reason for the wait.
        assert told == [names.FAILED if ask.end == "NO_MODEL" else names.EXPIRED], (ask.kind, ask.end)
        assert not phases or last[-1] in (names.CANCELLED, names.EXPIRED)
    else:
        assert told == [names.REFUSED] and not phases, (ask.kind, ask.end)


def _check_step_spans(otlp: OtlpReceiver, log: StepIndex) -> None:
    """Each is of a step of the log, in a trace of its own, and links to requests that took part."""
    spans = [span for span in otlp.spans() if span.name == names.WORKER_STEP]
    assert spans
    traces = otlp.traces()
    for span in spans:
        assert not span.parent_id and len(traces[span.trace_id].spans) == 1 and len(span.links) <= 32
        report = log.by_step.get(span.attributes[names.STEP])
        if report is None:
            continue  # one without work: it told the worker to forget rows
        assert span.attributes["quire.step.computed_tokens"] == report.computed_tokens
        assert span.attributes[names.IS_REPEAT] == report.is_repeat
        assert span.attributes["quire.step.blocks_swapped_in"] == len(report.swap_in)
        assert span.attributes["quire.step.blocks_swapped_out"] == len(report.swap_out)
        assert span.attributes["quire.step.model_ns"] == report.times.model_ns
        for link in span.links:
            assert names.SEQUENCE in {other.name for other in traces[link.trace_id].spans}


Run = Callable[[str, list[Ask], Path], Ran]


def _all(run: Run, count: int, otlp: OtlpReceiver, monkeypatch: pytest.MonkeyPatch, folder: Path) -> str:
    """Under both policies, half of them each."""
    seen, num_spans = Counter[str](), 0
    for policy in POLICIES:
        wanted, found = asks(count // len(POLICIES)), Counter[str]()
        for _ in range(MOST_ROUNDS):
            with exporting(otlp, monkeypatch):
                ran = run(policy, wanted, tenants_file(folder))
            assert ran[0]["served"] > 0.4 * len(wanted)
            found += _check(wanted, ran, otlp)
            num_spans += len(otlp)
            otlp.clear()
            if found["preempted"]:
                break
        seen += found
    for kind in ("chunked", "preempted", "swapped", "cancelled: left", "invalid: INVALID_FIELD", "quota: TENANT_QUOTA"):
        assert seen[kind], (kind, seen)
    assert seen["preempted"] > seen["swapped"] and any(kind.startswith("waits_too_long: ") for kind in seen)
    assert any(kind.startswith("runs_too_long: D") for kind in seen), seen
    return f"traces: {count} requests, {num_spans} spans, {seen['preempted']} preemptions, {seen['chunked']} chunked"


def test_every_kind_of_request(
    otlp: OtlpReceiver, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    """R12: one root each, no orphan, all three services, times nest, events with the numbers of the step log."""
    record_property("size", _all(_here, 160, otlp, monkeypatch, tmp_path))


@pytest.mark.long
def test_every_kind_of_request_many_times(
    otlp: OtlpReceiver, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    """The same with 10,000 requests and three processes."""
    record_property("size", _all(_apart, 10_000, otlp, monkeypatch, tmp_path))
