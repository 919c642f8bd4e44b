"""Preemption under `quire`: which request is preempted, for which, and how; never a more important one, never in vain."""

import random

import pytest

from scheduler_svc.core.parts.costs import Costs
from scheduler_svc.core.parts.ordering import AgingPriority
from scheduler_svc.core.parts.preemption import num_lost_tokens
from scheduler_svc.core.plan import StepPlan, StepResult
from scheduler_svc.core.reasons import Reason
from scheduler_svc.core.scheduler import Scheduler
from tests.support.core.builders import answer
from tests.support.core.lives import Life
from tests.support.core.preset_lives import happen
from tests.support.core.quire_builders import (
    CHEAP_SWAP,
    DEAR_SWAP,
    quire_core,
    request,
    running,
    serve,
    swapped,
    waiting,
)
from tests.support.core.random_policies import random_setting
from tests.support.seeds import seeds


def step(core: Scheduler, now: float = 0.0) -> StepPlan:
    """One step, planned and applied."""
    [plan] = core.schedule(now)
    if not plan.is_empty:
        core.update(answer(plan), now)
    return plan


def run_until_preempted(core: Scheduler, most: int = 60) -> StepPlan:
    """Steps until a request is preempted."""
    for number in range(most):
        plan = step(core, float(number))
        if plan.preempted:
            return plan
    raise AssertionError("no request was preempted")


# --- the victim -----------------------------------------------------------------------------------------------------------


def test_among_equals_the_one_that_loses_least_leaves() -> None:
    """R60, R130: of those behind the one in need, not the newest as such, but the one that has computed least."""
    core = quire_core({"num_gpu_blocks": 10, "num_cpu_blocks": 0})
    for at, (name, prompt) in enumerate((("old", 8), ("small", 5), ("large", 18))):
        core.add(request(name, prompt, max_tokens=30, at=float(at)))
    plan = run_until_preempted(core)
    assert plan.preempted == [("small", "recompute")]
    assert running(core) == ["old", "large"]


def test_the_lowest_class_leaves_first_however_much_it_loses() -> None:
    """R82, R130: priority comes before lost work."""
    core = quire_core({"num_gpu_blocks": 12, "num_cpu_blocks": 0})
    for name, prompt, priority in (("old", 8, 0), ("small", 5, 0), ("large", 18, 1)):
        core.add(request(name, prompt, max_tokens=30, at=float(len(name)), priority=priority))
    assert run_until_preempted(core).preempted == [("large", "recompute")]


def test_the_least_important_request_preempts_itself() -> None:
    """R60: a less important one in need preempts no other."""
    core = quire_core({"num_gpu_blocks": 7, "num_cpu_blocks": 0})
    core.add(request("low", 11, max_tokens=30, at=0.0, priority=3))
    core.add(request("high", 9, max_tokens=3, at=0.0))
    step(core)
    assert running(core) == ["high", "low"]
    plan = run_until_preempted(core)
    assert plan.preempted == [("low", "recompute")]
    assert "high" in {entry.request_id for entry in plan.scheduled}


def test_blocks_that_others_hold_are_not_lost() -> None:
    """R22, R134: tokens in shared prefix blocks come back as hits, so they do not count."""
    core = quire_core({"prefix_caching": True})
    for name in ("a", "b"):
        shared = request(name, 12, max_tokens=20)
        shared.prompt_token_ids[:] = range(1, 13)
        shared.as_one_group()
        core.add(shared)
        step(core)
    step(core)
    a, b = core.state.running
    assert a.live[0].num_computed_tokens == 14
    assert [num_lost_tokens(group, core.state) for group in (a, b)] == [14 - 8, 13 - 8]
    a.request.no_cache_reuse = True
    assert num_lost_tokens(a, core.state) == 14


@pytest.mark.parametrize("seed", seeds(8, 30))
def test_no_less_important_one_pushes_out_a_more_important_one(seed: int) -> None:
    """R82, R130: in random runs every victim is behind its beneficiary, unless that one is stuck and none gains tokens;
    for a head that waits it is of a lower class and behind by the margin."""
    rng = random.Random(f"inversion {seed}")
    setting = random_setting("quire", rng)
    while setting.spec.policy != "aged":
        setting = random_setting("quire", rng)
    life = Life(setting)
    aged = AgingPriority(setting.spec.patience_s, life.core.state.costs)
    for _ in range(80):
        before = life.core.state.guard.favourite
        plans = len(life.seen)
        happen(life, 1.2, rng)
        stuck = {before, life.core.state.guard.favourite}
        for plan in life.seen[plans:]:
            for event in plan.events:
                by = event.numbers.get("by")
                if event.reason is not Reason.PREEMPTED or by in ("", event.request_id):
                    continue
                needy, victim = life.requests[str(by)], life.requests[event.request_id]
                if not any(g is not None and g.request is needy for g in stuck):
                    assert aged.key(needy.groups[0]) < aged.key(victim.groups[0])


# --- the beneficiary ------------------------------------------------------------------------------------------------------


def test_the_head_takes_a_place_when_sequences_are_full() -> None:
    """R82, R132: also at max_num_seqs; it starts in the same step."""
    core = quire_core({"max_num_seqs": 2}, patience_s=10.0)
    for name, priority in (("b", 1), ("c", 2)):
        core.add(request(name, 4, max_tokens=30, priority=priority))
    step(core)
    core.add(request("a", 4, at=1.0, priority=0))
    plan = step(core, 1.0)
    assert plan.preempted == [("c", "recompute")]
    assert running(core) == ["b", "a"]
    assert waiting(core) == ["c"]


def test_the_head_takes_the_blocks_it_needs_and_no_more() -> None:
    """R82, R83: the lowest class first, in it the one that loses least; a request that need not be preempted after all stays."""
    core = quire_core({"num_gpu_blocks": 17, "num_cpu_blocks": 0}, patience_s=10.0)
    for name, prompt, priority in (("b", 11, 1), ("c", 11, 2), ("d", 3, 2), ("e", 19, 2)):
        core.add(request(name, prompt, max_tokens=30, priority=priority))
    step(core)
    step(core)
    core.add(request("a", 30, at=1.0, priority=-1))
    plan = step(core, 1.0)
    assert plan.preempted == [("c", "recompute"), ("e", "recompute")]
    assert running(core) == ["b", "d", "a"]


def test_no_preemption_is_in_vain() -> None:
    """R83: where the head would not fit with all less important ones gone, all stay."""
    core = quire_core({"num_gpu_blocks": 13, "num_cpu_blocks": 0}, patience_s=10.0)
    core.add(request("same", 23, max_tokens=8))
    core.add(request("low", 7, max_tokens=8, priority=2))
    step(core)
    core.add(request("big", 30, at=1.0, priority=0))
    assert core.state.waiting.peek().request.request_id == "big"
    plan = step(core, 1.0)
    assert plan.preempted == []
    assert running(core) == ["same", "low"]


def test_an_earlier_arrival_alone_preempts_nothing() -> None:
    """R82: equal classes wait for each other."""
    core = quire_core({"max_num_seqs": 1}, patience_s=10.0)
    core.add(request("late", 4, at=50.0, max_tokens=10))
    step(core, 50.0)
    core.add(request("early", 4, at=0.0))
    assert step(core, 51.0).preempted == []


def test_an_aged_request_is_not_preempted() -> None:
    """R82, R202: a class is worth `patience_s` and no more; within `margin_s` of each other none is preempted."""
    for at, leaves in ((8.0, True), (9.5, False), (11.0, False)):
        core = quire_core({"max_num_seqs": 1}, patience_s=10.0, margin_s=1.0)
        core.add(request("low", 4, at=0.0, max_tokens=30, priority=1))
        step(core, 0.0)
        core.add(request("high", 4, at=at, priority=0))
        assert bool(step(core, at).preempted) is leaves


def test_a_newcomer_waits_for_the_token_budget_without_preempting() -> None:
    """R82: a prompt's chunks that take all of a step are no reason to leave."""
    core = quire_core({"max_num_batched_tokens": 8}, patience_s=10.0)
    core.add(request("long", 40, priority=2))
    step(core)
    core.add(request("a", 4, at=1.0, priority=0))
    assert step(core, 1.0).preempted == []


@pytest.mark.parametrize("seed", seeds(4, 15))
def test_no_more_important_one_waits_for_places_of_less_important_ones(seed: int) -> None:
    """R82, R132: with blocks and tokens for all and few places, a running request is not outranked by the head of the queue."""
    rng = random.Random(f"places {seed}")
    patience_s = rng.choice([10.0, 40.0])
    core = quire_core({"max_num_seqs": rng.randint(1, 3), "num_gpu_blocks": 400}, patience_s=patience_s)
    aged, num_left, requests = AgingPriority(patience_s, core.state.costs), 0, []
    for now in range(150):
        if rng.random() < 0.6:
            requests.append(
                request(f"r{now}", rng.randint(1, 6), rng.randint(1, 12), at=now, priority=rng.randint(-2, 2))
            )
            core.add(requests[-1])
        plan = step(core, float(now))
        num_left += len(plan.preempted)
        head = core.state.waiting.peek() if len(core.state.waiting) else None
        for group in core.state.running if head is not None else []:
            start_by = aged.key(head)[0] + 1.0
            outranked = group.request.priority_class > head.request.priority_class and aged.key(group)[0] > start_by
            assert not outranked or group.request.first_scheduled_time == now
    serve(core, start=150.0)
    assert num_left > 0
    assert all(len(r.sequences[0].token_ids) == len(r.prompt_token_ids) + r.stop.max_tokens for r in requests)


# --- how ------------------------------------------------------------------------------------------------------------------


def tight(costs: dict[str, float], **more: object) -> Scheduler:
    """Two that soon need each other's blocks."""
    core = quire_core({"num_gpu_blocks": 9, **more}, **costs)
    core.add(request("a", 11, max_tokens=20))
    core.add(request("b", 11, max_tokens=20, at=1.0))
    return core


@pytest.mark.parametrize(
    ("costs", "host", "mode"),
    [
        (CHEAP_SWAP, 64, "swap"),
        (DEAR_SWAP, 64, "recompute"),
        ({}, 64, "recompute"),
        ({"compute_token_s": 0.1}, 64, "swap"),
        ({"swap_block_s": 0.1}, 64, "recompute"),
        (CHEAP_SWAP, 2, "recompute"),
        (CHEAP_SWAP | {"preemption_mode": "recompute"}, 64, "recompute"),
        (DEAR_SWAP | {"preemption_mode": "swap"}, 64, "swap"),
        (DEAR_SWAP | {"preemption_mode": "swap"}, 2, "recompute"),
    ],
)
def test_the_cheaper_way_is_taken(costs: dict[str, object], host: int, mode: str) -> None:
    """R75, R76: by costs; not while nothing is known, nor when the host is full; copying is tried to learn what it costs; the
    operator's word wins."""
    core = tight(costs, num_cpu_blocks=host)  # type: ignore[arg-type]
    assert run_until_preempted(core).preempted == [("b", mode)]
    assert swapped(core) == (["b"] if mode == "swap" else [])
    serve(core)
    assert core.pool_report().refs == {}


def test_costs_are_observed() -> None:
    """R76: what was measured counts from then on; what was not measured stays."""
    core = tight(DEAR_SWAP)
    core.observe_costs(Costs(swap_block_s=0.001))
    assert core.state.costs.now == Costs(compute_token_s=0.1, swap_block_s=0.001)
    assert run_until_preempted(core).preempted == [("b", "swap")]


def test_what_was_swapped_comes_back_before_new_prompts_and_computes_nothing_again() -> None:
    """R5, R73, R74, R78: never in a step that swaps out; with its blocks, at the token where it was."""
    core = tight(CHEAP_SWAP)
    out = run_until_preempted(core)
    assert len(out.swap_out) == 4 and not out.swap_in
    computed = core.state.swapped[0].live[0].num_computed_tokens
    core.add(request("new", 4, at=2.0))
    seen: list[StepPlan] = []
    serve(core, look=seen.append)
    back = next(plan for plan in seen if plan.swap_in)
    entry = next(e for e in back.scheduled if e.request_id == "b")
    assert (entry.computed_before, entry.fresh, len(entry.new_block_ids)) == (computed, True, 5)
    assert not back.swap_out
    first_of_new = next(i for i, plan in enumerate(seen) if any(e.request_id == "new" for e in plan.scheduled))
    assert seen.index(back) <= first_of_new


def test_a_more_important_prompt_starts_before_what_was_swapped() -> None:
    """R81: the host is no shortcut past the queue."""
    core = tight(CHEAP_SWAP)
    run_until_preempted(core)
    core.add(request("now", 12, max_tokens=2, at=2.0, priority=-5))
    seen: list[StepPlan] = []
    serve(core, look=seen.append)
    order = [e.request_id for plan in seen for e in plan.scheduled if e.fresh]
    assert order == ["now", "a", "b"]


def test_a_token_in_flight_is_kept_and_its_sequence_waits_for_it_on_the_host() -> None:
    """R154: swapped with a step in flight, it gains that step's token there, and comes back only then."""
    core = quire_core({"num_gpu_blocks": 9}, batch_queue=2, **CHEAP_SWAP)
    core.add(request("a", 11, max_tokens=20))
    core.add(request("b", 11, max_tokens=20, at=1.0))
    in_flight: list[StepPlan] = []
    for now in range(12):
        [plan] = core.schedule(float(now))
        in_flight.append(plan)
        if plan.swap_out:
            break
        if len(in_flight) == 2:
            core.update(answer(in_flight.pop(0)))
    [b] = [group.live[0] for group in core.state.swapped]
    assert b.num_placeholders == 1
    num_tokens = b.num_tokens
    core.abort(["a"])
    core.update(answer(in_flight.pop(0)))
    assert (b.num_tokens, b.num_placeholders) == (num_tokens + 1, 0)
    [plan] = core.schedule(20.0)
    assert plan.swap_in
    assert [e.token_ids for e in plan.scheduled] == [b.token_ids]


def test_beams_swapped_while_their_first_step_is_in_flight_fork_on_the_host() -> None:
    """R74, R102, R154: the children share their parent's host blocks, and come back with it."""
    core = quire_core({"num_gpu_blocks": 8, "max_num_seqs": 4}, batch_queue=2, **CHEAP_SWAP)
    core.add(request("a", 11, max_tokens=12))
    step(core)
    core.add(request("beams", 15, max_tokens=4, at=1.0, beams=2))
    plans = []
    for now in range(1, 12):
        plans += core.schedule(float(now))
        if core.state.swapped:
            break
        if plans and not any(e.request_id == "beams" for e in plans[0].scheduled):
            core.update(answer(plans.pop(0)))
    [group] = core.state.swapped
    for plan in plans:
        tokens = {n: t for n, t in answer(plan).tokens.items() if not n.startswith("beams")}
        beams = {
            e.name: [(5, -0.1), (6, -0.2), (7, -0.3), (8, -0.4)] for e in plan.scheduled if e.request_id == "beams"
        }
        core.update(StepResult(plan.step, tokens, candidates=beams))
    host = core.state.cache.ledger.host_tables
    assert len(group.live) == 2
    assert host["beams/0"] == host["beams/1"]
    assert core.check_integrity() == []


def test_beams_take_no_guesses() -> None:
    """R21, R150: beams give a token each in one step; with guesses of some and not of others they could not go on."""
    core = quire_core(num_spec_tokens=2)
    beams = request("beams", 6, max_tokens=3, beams=2)
    core.add(beams)
    for now in range(20):
        for plan in core.schedule(float(now)):
            assert [entry.num_drafts for entry in plan.scheduled] == [0] * len(plan.scheduled)
            found = {entry.name: [(5 + i, -0.1 * (i + 1)) for i in range(4)] for entry in plan.scheduled}
            core.update(StepResult(plan.step, candidates=found))
    assert [len(s.token_ids) for s in beams.best_sequences()] == [9, 9]


def test_a_failed_step_sends_back_what_a_later_step_swapped_out() -> None:
    """R3, R154: its host blocks may be copies of what never was computed."""
    core = quire_core({"num_gpu_blocks": 9, "prefix_caching": True}, batch_queue=2, fast_path=False, **CHEAP_SWAP)
    core.add(request("a", 11, max_tokens=20))
    core.add(request("b", 11, max_tokens=20, at=1.0))
    plans: list[StepPlan] = []
    for now in range(20):
        plans += core.schedule(float(now))
        if core.state.swapped:
            break
        if len(plans) == 2:
            core.update(answer(plans.pop(0)))
    first, second = plans
    assert second.swap_out
    only_a = next(e for e in first.scheduled if e.request_id == "a")
    core.workers[0].flights._by_step[first.step] = [
        flight for flight in core.workers[0].flights.land(first.step) if flight.sequence.name == only_a.name
    ]
    core.fail_step(first.step, "broken")
    assert swapped(core) == []
    assert waiting(core) == ["b"]
    assert core.state.waiting.peek().live[0].num_computed_tokens == 0


# --- and it goes on -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", seeds(4, 12))
def test_a_pool_that_fits_one_sequence_serves_all(seed: int) -> None:
    """R197, R208: whatever their priorities, with swapping and without; every request gets all its tokens."""
    rng = random.Random(seed)
    costs = rng.choice([CHEAP_SWAP, DEAR_SWAP, {}])
    core = quire_core(
        {"num_gpu_blocks": 6, "max_model_len": 20}, restraint=rng.choice([None, "expected_peak"]), **costs
    )
    requests = [
        request(f"r{i}", rng.randint(1, 14), 5, at=float(i), priority=rng.randint(-2, 2))
        for i in range(rng.randint(3, 9))
    ]
    for each in requests:
        core.add(each)
    serve(core)
    assert [each.sequences[0].num_output_tokens for each in requests] == [5] * len(requests)
    assert core.pool_report().refs == {}
    assert requests[0].priority_class in range(-2, 3)
