"""Defects of the references that are not built here, each as small as it can be."""

from typing import Any

import pytest

from scheduler_svc.core.composition import presets
from scheduler_svc.core.limits import CoreLimits
from scheduler_svc.core.plan import EndedSequence, ScheduledSequence, StepPlan, StepResult
from scheduler_svc.core.request import Request, SequenceStatus
from scheduler_svc.core.request_rules import BeamRules, StopRules
from scheduler_svc.core.scheduler import Scheduler
from tests.support.core.builders import make_request


def build(policy: str, *, knobs: dict[str, object] | None = None, **limits: int | bool) -> Scheduler:
    """A core with small numbers."""
    given: dict[str, Any] = {
        "block_size": 4, "num_gpu_blocks": 8, "num_cpu_blocks": 8, "max_model_len": 32, "max_num_seqs": 8,
        "max_num_batched_tokens": 32, "prefix_caching": False,
    }  # fmt: skip
    return presets.build(policy, CoreLimits(**{**given, **limits}), **(knobs or {}))


def samples(
    name: str, length: int, n: int, *, priority: int = 0, arrival: float = 0.0, max_tokens: int = 20
) -> Request:
    """A request of `n` samples."""
    return Request(name, list(range(1, length + 1)), StopRules(max_tokens), arrival, priority=priority, n=n)


def answer(core: Scheduler, plan: StepPlan) -> StepResult:
    """A worker that gives 7 everywhere, and forks a prompt of several samples."""
    result = StepResult(plan.step)
    for entry in plan.scheduled:
        request = core.request(entry.request_id)
        assert request is not None
        if entry.samples and len(request.sequences) < request.num_samples:
            result.children[entry.name] = [7] * request.num_samples
        elif entry.samples:
            result.tokens[entry.name] = [7]
    return result


def step(core: Scheduler) -> tuple[StepPlan, list[EndedSequence]]:
    """One step and what ended by it."""
    [plan] = core.schedule(0.0)
    return plan, plan.ended + core.update(answer(core, plan)).ended


def ends(core: Scheduler, most: int) -> dict[str, EndedSequence]:
    """Steps until nothing is left."""
    ended: list[EndedSequence] = []
    for _ in range(most):
        if not core.has_unfinished:
            return {e.name: e for e in ended}
        ended += step(core)[1]
    raise AssertionError("livelock")


def test_two_that_fill_the_pool_do_not_chase_each_other() -> None:
    """R66, R208: each needs the whole pool; under chunks the reference preempts them in turn for ever."""
    core = build("vllm-v0-chunked", num_gpu_blocks=4, max_model_len=16, max_num_batched_tokens=8)
    for name in "ab":
        core.add(make_request(name, 14, max_tokens=3))
    assert {e.status for e in ends(core, 200).values()} == {SequenceStatus.FINISHED_LENGTH_CAPPED}


@pytest.mark.parametrize("policy", ["vllm-v0", "vllm-v0-chunked", "vllm-2023", "vllm-v1", "vllm-v1-async", "static"])
def test_a_request_that_can_never_fit_alone_ends(policy: str) -> None:
    """R197: it outgrows the pool and is given up with a reason; the one behind it is served."""
    core = build(policy, num_gpu_blocks=3, max_model_len=32)
    core.add(make_request("big", 7, max_tokens=20))
    core.add(make_request("small", 3, max_tokens=2))
    ended = ends(core, 300)
    assert ended["big/0"].status is SequenceStatus.FINISHED_IGNORED
    assert ended["big/0"].error
    assert ended["small/0"].status is SequenceStatus.FINISHED_LENGTH_CAPPED


def test_a_finished_sample_frees_its_blocks_while_siblings_go_on() -> None:
    """R199: blocks and places of a finished sample are free at once."""
    core = build("vllm-v0")
    core.add(samples("a", 4, 3))
    step(core)
    step(core)
    free, group = core.state.cache.num_free_gpu, core.state.running[0]
    core.stop_at("a/1", 1)
    assert core.state.cache.num_free_gpu == free + 1
    assert (group.max_num_running_seqs, sorted(core.block_tables())) == (2, ["a/0", "a/2"])


def test_the_one_survivor_of_a_group_is_computed_again() -> None:
    """R199, R203: with finished siblings, the first of them among these, only the survivor is prefilled again."""
    core = build("vllm-v0", num_gpu_blocks=5)
    core.add(make_request("first", 8, max_tokens=12))
    core.add(samples("a", 6, 2))
    step(core)
    core.stop_at("a/0", 1)
    preempted: list[tuple[str, str]] = []
    resumed: list[ScheduledSequence] = []
    while core.has_unfinished and not resumed:
        plan, _ = step(core)
        preempted += plan.preempted
        resumed = [e for e in plan.scheduled if e.resumed]
    assert preempted == [("a", "recompute")]
    assert [(e.name, e.computed_before, e.num_tokens, e.samples) for e in resumed] == [
        ("a/1", 0, len(resumed[0].token_ids or []), True)
    ]


def test_the_stage_of_a_group_is_that_of_its_live_sequences() -> None:
    """R203: a survivor that is prefilled again in chunks counts as a prompt until its last chunk."""
    core = build("vllm-v0-chunked", num_gpu_blocks=5, max_num_seqs=4, max_num_batched_tokens=4)
    core.add(samples("a", 6, 2))
    while "a/1" not in core.block_tables():
        step(core)
    core.stop_at("a/0", 1)
    for _ in range(3):
        step(core)
    core.reset_prefix_cache(preempt_running=True)
    plans = [step(core)[0] for _ in range(4)]
    assert [p.scheduled[0].num_tokens for p in plans] == [4, 4, 2, 1]
    assert [p.num_prefill_groups for p in plans] == [1, 1, 1, 0]


def test_beams_keep_the_places_of_those_that_finished() -> None:
    """R25: the live ones become as many again in the next step, so no other request may take their places meanwhile."""
    request = Request("a", [1, 2], StopRules(9), 0.0, n=2, best_of=3, beam=BeamRules())
    [group] = request.groups
    for index in (1, 2):
        group.add(group.sequences[0].fork(index))
    group.sequences[1].status = SequenceStatus.FINISHED_STOPPED
    assert (len(group.live), group.max_num_running_seqs) == (2, 3)


def test_a_group_pushed_out_by_priority_comes_back_from_the_host() -> None:
    """R205: it goes to the swapped queue with its pairs, and no step moves blocks both ways."""
    core = build("vllm-v0", knobs={"policy": "priority"}, num_gpu_blocks=6)
    core.add(samples("low", 8, 2, priority=5, max_tokens=4))
    step(core)
    core.add(make_request("high", 16, max_tokens=2, priority=1, arrival=1.0))
    plans = [step(core)[0] for _ in range(8)]
    pushed = next(p for p in plans if p.swap_out)
    back = next(p for p in plans if p.swap_in)
    assert pushed.preempted == [("low", "swap")]
    assert {host for _, host in pushed.swap_out} == {host for host, _ in back.swap_in}
    assert not [p for p in plans if p.swap_in and p.swap_out]
    assert {e.status for e in ends(core, 50).values()} <= {SequenceStatus.FINISHED_LENGTH_CAPPED}


def test_a_swapped_group_can_be_aborted_with_caching_on() -> None:
    """R206, R198: its host blocks are free, the device's books are untouched."""
    core = build("vllm-v0", knobs={"preemption_mode": "swap"}, num_gpu_blocks=4, prefix_caching=True)
    for name in "ab":
        core.add(make_request(name, 7, max_tokens=9))
    while not core.state.swapped:
        step(core)
    victim = core.state.swapped[0].request.request_id
    assert [e.status for e in core.abort([victim])] == [SequenceStatus.FINISHED_ABORTED]
    pool = core.pool_report()
    assert pool.cpu.free == pool.cpu.total
    assert core.check_integrity() == []
    ends(core, 100)
    assert core.pool_report().refs == {}


def test_the_model_length_is_stronger_than_min_tokens() -> None:
    """R95, R140: with min_tokens beyond what the model holds a sequence ends at the model's length instead of waiting for ever."""
    core = build("vllm-v1", max_model_len=8)
    core.add(Request("a", [1] * 6, StopRules(max_tokens=9, min_tokens=9), 0.0))
    assert ends(core, 20)["a/0"].num_output_tokens == 2


def test_a_prompt_in_chunks_is_known_no_further_than_it_was_computed() -> None:
    """R88, R93, R115: its first chunk takes blocks for all of it; a request with the same prompt computes what no chunk did."""
    core = build("vllm-v0-chunked", num_gpu_blocks=16, max_num_batched_tokens=8, prefix_caching=True)
    prompt = list(range(1, 17))
    core.add(make_request("a", prompt))
    step(core)
    core.abort(["a"])
    core.add(make_request("b", prompt))
    plan, _ = step(core)
    assert [(e.name, e.num_tokens, e.num_cached_blocks) for e in plan.scheduled] == [("b/0", 8, 2)]


@pytest.mark.parametrize("fails", ["step", "row"])
def test_blocks_of_a_victim_are_not_found_when_its_step_fails(fails: str) -> None:
    """R136, R154: preempted with a step in flight, its freed blocks are known by contents that this step then does not make."""
    core = build("vllm-v1-async", num_gpu_blocks=4, max_model_len=12, prefix_caching=True)
    core.add(make_request("a", 6, max_tokens=5))
    core.add(make_request("b", [1, 2, 3, 4], max_tokens=5))
    plans = core.schedule(0.0)
    plans += core.schedule(0.0)
    while not plans[-1].preempted:
        core.update(answer(core, plans.pop(0)))
        plans += core.schedule(0.0)
    assert plans[-1].preempted == [("b", "recompute")]
    if fails == "step":
        core.fail_step(plans[0].step, "broken")
    else:
        core.update(StepResult(plans[0].step, {"a/0": [5]}, failed={"b/0": "not finite"}))
    core.add(make_request("c", [1, 2, 3, 4, 5], max_tokens=5))
    core.abort(["a"])
    [plan] = core.schedule(0.0)
    assert [(e.name, e.computed_before) for e in plan.scheduled] == [("c/0", 0)]


def test_what_was_planned_on_a_failed_step_is_computed_again() -> None:
    """R136: under asynchronous scheduling the next plan may build on blocks that a step promised and never filled."""
    core = build("vllm-v1-async", num_gpu_blocks=16, prefix_caching=True)
    prompt = list(range(1, 10))
    core.add(make_request("a", prompt))
    [first] = core.schedule(0.0)
    core.add(make_request("b", prompt))
    [second] = core.schedule(0.0)
    assert [e.computed_before for e in second.scheduled if e.request_id == "b"] == [8]
    assert [e.request_id for e in core.fail_step(first.step, "broken").ended] == ["a"]
    assert core.update(StepResult(second.step, {"b/0": [7]})).runs == []
    [third] = core.schedule(0.0)
    assert [(e.name, e.computed_before, e.num_tokens, e.fresh) for e in third.scheduled] == [("b/0", 0, 9, True)]
