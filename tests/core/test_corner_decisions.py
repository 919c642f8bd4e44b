"""Decisions of the core that only corner cases show; `tests/mutants.py` breaks each of them and expects a test here to fail."""

from dataclasses import replace

import numpy as np
import pytest

from scheduler_svc.core.composition import live_change, presets
from scheduler_svc.core.limits import CoreLimits
from scheduler_svc.core.parts.admission_forecast import BlockDemand, PeakForecastAdmission, TableGrowth
from scheduler_svc.core.plan import StepPlan, StepResult
from scheduler_svc.core.policies.chitu.affinity import PrefixAffinity
from scheduler_svc.core.reasons import Reason
from scheduler_svc.core.scheduler import Scheduler
from tests.support.core.builders import answer, make_core, make_request, one_step, shares
from tests.support.core.quire_builders import CHEAP_SWAP, quire_core, request, running, swapped, waiting
from tests.support.core.task_builders import Tasks

# --- budget ---------------------------------------------------------------------------------------------------------------


def test_tokens_of_a_withdrawn_victim_go_to_others() -> None:
    """R130: the victim had its token in this step already; the prompt behind it gets that token too."""
    core = make_core("priority", num_gpu_blocks=11, max_num_batched_tokens=8, prefix_caching=False)
    for name, prompt, priority in (("low", 4, 9), ("high", 5, 0)):
        core.add(make_request(name, prompt, max_tokens=20, priority=priority))
        one_step(core)
    core.add(make_request("prompt", 30, max_tokens=2, priority=1))
    plan = _until_preempted(core)
    assert plan.preempted == [("low", "recompute")]
    assert shares(plan) == {"high": 1, "prompt": 7}


# --- victims --------------------------------------------------------------------------------------------------------------


def test_of_victims_that_lose_the_same_the_newest_leaves() -> None:
    """R60, R130: when blocks run out, and when the head of the queue needs a place."""
    core = quire_core({"num_gpu_blocks": 10, "num_cpu_blocks": 0})
    for at, name in enumerate(("a", "b", "c")):
        core.add(request(name, 10, max_tokens=20, at=float(at)))
    preempted: list[tuple[str, str]] = []
    for now in range(12):
        preempted += _step(core, float(now)).preempted
        if preempted:
            break
    assert preempted == [("c", "recompute")]

    core = quire_core({"max_num_seqs": 2}, patience_s=10.0)
    for name in ("b", "c"):
        core.add(request(name, 4, max_tokens=30, priority=2))
    _step(core)
    core.add(request("head", 4, at=1.0, priority=0))
    assert _step(core, 1.0).preempted == [("c", "recompute")]


def test_among_equals_in_order_the_first_of_the_last_leaves() -> None:
    """R130: requests of one priority and one arrival: the choice is the same in every run, and it is not the newest."""
    core = make_core("priority", num_gpu_blocks=8, prefix_caching=False)
    for name in ("a", "b", "c"):
        core.add(make_request(name, 7, max_tokens=20, priority=1))
    assert _until_preempted(core).preempted[0] == ("a", "recompute")


def _until_preempted(core: Scheduler) -> StepPlan:
    """The first plan that preempts."""
    return next(plan for plan, _ in (one_step(core) for _ in range(20)) if plan.preempted)


# --- results in flight ----------------------------------------------------------------------------------------------------


def test_a_request_does_not_start_again_before_its_token_in_flight_is_known() -> None:
    """R154: it was preempted with a step in flight; there is room for it, and it waits for that result."""
    core = quire_core({"num_gpu_blocks": 9, "num_cpu_blocks": 0}, batch_queue=3)
    core.add(request("a", 11, max_tokens=20))
    core.add(request("b", 11, max_tokens=20, at=1.0))
    in_flight = _plan_until_preempted(core)
    core.abort(["a"])
    [b] = [group.live[0] for group in core.state.waiting]
    assert b.num_placeholders == 1
    [plan] = core.schedule(20.0)
    assert plan.is_empty and [e.reason for e in plan.events if e.request_id == "b"][-1:] == [Reason.RESULT_PENDING]
    for earlier in in_flight:
        core.update(answer(earlier))
    [plan] = core.schedule(21.0)
    assert [(e.request_id, e.num_tokens) for e in plan.scheduled] == [("b", b.num_tokens)]


def _plan_until_preempted(core: Scheduler) -> list[StepPlan]:
    """Plans, two in flight at a time, until one preempts; those without a result."""
    in_flight: list[StepPlan] = []
    for now in range(20):
        [plan] = core.schedule(float(now))
        in_flight.append(plan)
        if plan.preempted:
            return in_flight
        if len(in_flight) == 2:
            core.update(answer(in_flight.pop(0)))
    raise AssertionError("no plan preempted")


def _step(core: Scheduler, now: float = 0.0) -> StepPlan:
    [plan] = core.schedule(now)
    if not plan.is_empty:
        core.update(answer(plan), now)
    return plan


# --- rows that are not in plain decode ----------------------------------------------------------------------------------


@pytest.mark.parametrize("fast_path", [True, False])
def test_a_prompt_in_chunks_takes_its_share_before_those_that_started_later(fast_path: bool) -> None:
    """R129: where a step has too few tokens for all, the last to start get none, in whatever form the others are kept."""
    core = quire_core({"max_num_batched_tokens": 8, "long_prefill_token_threshold": 4}, fast_path=fast_path)
    core.add(request("prompt", 30, at=0.0))
    for at, name in enumerate("xyz", start=1):
        core.add(request(name, 1, max_tokens=20, at=float(at)))
    assert shares(_step(core)) == {"prompt": 4, "x": 1, "y": 1, "z": 1}
    assert shares(_step(core)) == {"prompt": 4, "x": 1, "y": 1, "z": 1}
    live_change.reconfigure(core, core.spec, replace(core.state.limits, max_num_seqs=6, max_num_batched_tokens=6))
    assert shares(_step(core)) == {"prompt": 4, "x": 1, "y": 1}


# --- ranks ----------------------------------------------------------------------------------------------------------------


class KnownTokens:
    """Cache rules of ranks that know so many tokens of any prompt."""

    def __init__(self, *known: int) -> None:
        self._known = list(known)

    def known_tokens(self, sequence: object) -> list[int]:
        """By rank."""
        return self._known


@pytest.mark.parametrize(
    ("known", "num_owned", "rank"),
    [
        ((8, 8, 8), (2, 1, 1), 1),  # the less busy, then the lower number
        ((8, 8, 8), (1, 2, 1), 0),
        ((0, 8, 8), (0, 2, 1), 2),
        ((4, 8, 4), (0, 3, 1), 1),  # more known comes before less busy
    ],
)
def test_of_ranks_that_know_as_much_the_less_busy_takes_it(
    known: tuple[int, ...], num_owned: tuple[int, ...], rank: int
) -> None:
    """R190: ties go to the less busy rank, then to the lower number."""
    draw = PrefixAffinity(KnownTokens(*known), slack=4).draw(object(), num_owned, (True, True, True))  # type: ignore[arg-type]
    assert draw is not None and draw.rank == rank


def test_empty_plans_of_other_ranks_do_not_end_a_task_that_runs() -> None:
    """R190: whether anything can go on is asked once for all ranks of a moment, not after each of their plans."""
    tasks = Tasks("chitu-dp", dp_size=6, max_reqs=12)
    for name in "abcdef":
        tasks.add(name, 6, max_tokens=8)
    tasks.step()
    assert [plan.lane for plan in tasks.plans if "f" in {e.request_id for e in plan.scheduled}] == [5]
    tasks.core.abort("abcde")
    request = tasks.core.request("f")
    assert request is not None
    tasks.run()
    assert request.sequences[0].num_output_tokens == 8


# --- room for the important -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("watermark", "leaving"), [(0, ["d"]), (3, ["d", "c"])])
def test_room_is_made_for_the_head_and_the_watermark(watermark: int, leaving: list[str]) -> None:
    """R52, R83: the head starts in the same step, behind as many free blocks as admission keeps."""
    core = quire_core({"num_gpu_blocks": 14, "num_cpu_blocks": 0}, patience_s=10.0, watermark_blocks=watermark)
    for name in ("b", "c", "d"):
        core.add(request(name, 9, max_tokens=30, priority=2))
    _step(core)
    core.add(request("a", 19, at=1.0, priority=0))
    plan = _step(core, 1.0)
    assert [name for name, _ in plan.preempted] == leaving
    assert "a" in running(core)


def test_room_is_made_where_only_the_watermark_is_in_the_way() -> None:
    """R52: the blocks are free, but admission keeps them: the less important request leaves."""
    core = quire_core({"num_gpu_blocks": 10, "num_cpu_blocks": 0}, patience_s=10.0, watermark_blocks=3)
    core.add(request("low", 9, max_tokens=30, priority=2))
    _step(core)
    core.add(request("a", 15, at=1.0, priority=0))
    plan = _step(core, 1.0)
    assert [name for name, _ in plan.preempted] == ["low"] and running(core) == ["a"]


# --- restraint ------------------------------------------------------------------------------------------------------------


def test_the_forecast_gets_more_careful_when_work_was_lost_and_less_when_outputs_end() -> None:
    """The factor on expected lengths rises by a tenth with a step that lost work, up to 1, and falls back with every end."""
    core = quire_core({"num_gpu_blocks": 64}, restraint="expected_peak", caution=0.3)
    part = next(check for check in _admission(core) if isinstance(check, PeakForecastAdmission))
    factors = [part._factor(core.state)]
    for lost, ended in ((7, 0), (7, 0), (9, 0), (9, 50), (9, 1_000)):
        core.state.num_lost_tokens = lost
        while core.state.lengths.num_noted < ended:
            core.state.lengths.note(10, 20)
        part._learn(core.state)
        factors.append(part._factor(core.state))
    assert factors == pytest.approx([0.3, 0.4, 0.4, 0.5, 0.4, 0.3])
    for lost in range(10, 30):
        core.state.num_lost_tokens = lost
        part._learn(core.state)
    assert part._factor(core.state) == 1.0


def test_a_prompt_is_held_back_exactly_when_the_expected_peak_exceeds_the_pool() -> None:
    """Two requests of 8 prompt and 24 output tokens, blocks of 4, no experience: both grow to 8 blocks, and the last blocks are
    half full on average: the peak is 16 - 1/2 and a half: a pool of one block fewer holds the second back."""
    entered = {}
    for usable in range(12, 20):
        core = quire_core({"num_gpu_blocks": usable + 1}, restraint="expected_peak", caution=1.0)
        for at, name in enumerate("ab"):
            core.add(request(name, 8, max_tokens=24, at=float(at)))
        [plan] = core.schedule(0.0)
        entered[usable] = running(core) == ["a", "b"]
        told = [e.numbers for e in plan.events if e.reason is Reason.RESERVED]
        assert bool(told) is not entered[usable]
        assert all(int(n["need"]) > int(n["capacity"]) == usable for n in told)
    assert [usable for usable, both in entered.items() if both] == [17, 18, 19]


def test_blocks_of_requests_that_end_first_are_free_at_the_end_of_longer_ones() -> None:
    """Two hold 2 blocks each; one has 4 tokens to come, the other 40, blocks of 4: the peak is at the end of the second, when the
    blocks of the first are free again: 4 in use, 10 and a half more, less 2."""
    two = (np.array([float(a), float(b)]) for a, b in ((8, 8), (2, 2), (2, 2), (4, 40), (1, 1)))
    assert BlockDemand(*two).peak(4, TableGrowth(4)) == 4 + 10 + 0.5 - 2


def _admission(core: Scheduler) -> list[object]:
    return [check for part in core.workers[0].parts for check in getattr(part, "_admission", [])]


# --- swapping -------------------------------------------------------------------------------------------------------------


def test_a_request_on_the_host_tells_the_blocks_that_it_needs_to_come_back() -> None:
    """NEED_BLOCKS: its blocks and the one for its next token, which is one more than what is free."""
    core = quire_core({"num_gpu_blocks": 9}, **CHEAP_SWAP)
    core.add(request("a", 11, max_tokens=20))
    core.add(request("b", 11, max_tokens=20, at=1.0))
    for now in range(20):
        _step(core, float(now))
        if swapped(core):
            break
    assert swapped(core) == ["b"]
    held = len(core.state.cache.ledger.host_tables["b/0"])
    plan = _step(core, 30.0)
    [told] = [e for e in plan.events if e.reason is Reason.NEED_BLOCKS]
    free = core.state.cache.num_free_gpu
    assert (told.request_id, told.numbers["need"]) == ("b", held + 1)
    assert int(told.numbers["need"]) > free - 1


@pytest.mark.parametrize("num_blocks", range(8, 14))
def test_under_v0_it_needs_the_slots_ahead_of_its_next_tokens_as_well(num_blocks: int) -> None:
    """R68, NEED_BLOCKS: what is told is what decided: free blocks less those needed are below the watermark."""
    knobs = {"preemption_mode": "swap", "num_lookahead_slots": 5, "watermark_blocks": 1}
    limits = CoreLimits(block_size=4, num_gpu_blocks=num_blocks, num_cpu_blocks=32, max_model_len=32, max_num_seqs=8)
    core = presets.build("vllm-v0", limits, **knobs)
    for at, name in enumerate("abc"):
        core.add(request(name, 5 + at, max_tokens=16, at=float(at)))
    told = []
    while core.has_unfinished:
        plan = _step(core)
        told += [e.numbers for e in plan.events if e.queue == "swapped" and e.reason is Reason.NEED_BLOCKS]
    assert told
    assert all(int(n["free"]) - int(n["need"]) < int(n["watermark"]) for n in told)


@pytest.mark.parametrize(("no_cache_reuse", "mode"), [(False, "swap"), (True, "recompute")])
def test_a_prompt_of_which_nothing_may_be_reused_starts_over(no_cache_reuse: bool, mode: str) -> None:
    """Preempted within its prompt; workers have no sums of its hidden states when it comes back from the host."""
    limits = {"num_gpu_blocks": 7, "max_num_batched_tokens": 8}
    core = quire_core(limits, **CHEAP_SWAP)
    core.add(request("a", 11, max_tokens=20))
    core.add(replace(request("b", 21, at=1.0), no_cache_reuse=no_cache_reuse))
    [sequence] = core.request("b").groups[0].sequences
    for now in range(30):
        num_computed = sequence.num_computed_tokens
        plan = _step(core, float(now))
        if plan.preempted:
            break
    assert plan.preempted == [("b", mode)]
    assert 0 < num_computed < 21
    assert sequence.num_computed_tokens == (0 if no_cache_reuse else num_computed)


# --- failed steps ---------------------------------------------------------------------------------------------------------


def _planned_on(core: Scheduler) -> tuple[StepPlan, StepPlan]:
    """`b` is planned on blocks that the plan before is to fill for `a`; `c` shares nothing."""
    prompt = list(range(1, 10))
    core.add(make_request("a", prompt))
    [first] = core.schedule(0.0)
    core.add(make_request("b", prompt))
    core.add(make_request("c", [50, 51, 52]))
    [second] = core.schedule(0.0)
    return first, second


def test_dependants_of_a_failed_step_start_anew_and_give_all_their_tokens() -> None:
    """R136: what was built on the failed step is computed again, whatever is in flight; each request ends once."""
    core = quire_core({"prefix_caching": True}, batch_queue=2)
    first, second = _planned_on(core)
    assert [e.request_id for e in core.fail_step(first.step, "broken").ended] == ["a"]
    assert sorted(waiting(core)) == ["b", "c"] and not running(core)
    assert core.update(StepResult(second.step, {"b/0": [7], "c/0": [7]})).runs == []
    [third] = core.schedule(1.0)
    assert {(e.request_id, e.computed_before, e.num_tokens) for e in third.scheduled} == {("b", 0, 9), ("c", 0, 3)}
    assert core.check_integrity() == []
