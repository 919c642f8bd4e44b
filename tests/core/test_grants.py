"""Decode grants: what a plan grants, what ends a grant, and that nothing else is different with them."""

from collections.abc import Callable
from typing import Any

import pytest

from scheduler_svc.core.composition import presets
from scheduler_svc.core.limits import CoreLimits
from scheduler_svc.core.plan import StepPlan, StepResult
from scheduler_svc.core.reasons import Reason, Revocation
from scheduler_svc.core.request import Request
from scheduler_svc.core.request_rules import StopRules
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.observe.timelines import Timelines
from tests.support.core.granting_lives import GRANTING, granting_life

Record = Callable[[str, object], None]
EOS = 7


def core_of(policy: str = "quire", *, max_granted_steps: int = 15, **model: Any) -> Scheduler:
    limits = CoreLimits(
        block_size=16, num_gpu_blocks=100, max_model_len=200, max_granted_steps=max_granted_steps, **model
    )
    return presets.build(policy, limits)


GROUPS = {"cache_windows": (0, 20, 9)}
STATES = {"num_state_blocks": 2, "checkpoint_tokens": 32}


def request(name: str, num_prompt: int = 5, max_tokens: int = 100) -> Request:
    return Request(name, list(range(10, 10 + num_prompt)), StopRules(max_tokens, eos_token_ids=frozenset([EOS])), 0.0)


def answer(core: Scheduler, plan: StepPlan, token: int = 1) -> None:
    core.update(StepResult(plan.step, {entry.name: [token] for entry in plan.scheduled if entry.samples}))


def granting_plan(core: Scheduler) -> StepPlan:
    """The first plan that grants steps; those before it are answered."""
    for _ in range(5):
        [plan] = core.schedule(0.0)
        if plan.grant is not None:
            return plan
        answer(core, plan)
    raise AssertionError("no plan granted anything")


@pytest.mark.parametrize("policy", GRANTING)
def test_a_grant_ends_with_the_first_row_that_ends_or_needs_a_block(policy: str) -> None:
    """No granted step needs a block; the last one is that in which the first row reaches its limit."""
    core = core_of(policy)
    core.add(request("a", num_prompt=5, max_tokens=12))
    core.add(request("b", num_prompt=3, max_tokens=100))
    plan = granting_plan(core)
    known = 5 + core.state.requests["a"].sequences[0].num_output_tokens
    held = {name: 16 * len(blocks) for name, blocks in core.block_tables().items()}
    num_slots = min(held[e.name] - e.computed_before for e in plan.scheduled) - 1
    assert plan.grant is not None and plan.grant.num_steps == min(5 + 12 - known - 1, num_slots) > 5
    assert plan.grant.stop_token_ids == (EOS,)
    answer(core, plan)
    for left in range(plan.grant.num_steps, 0, -1):
        assert core.has_grant() and not core.wants_step_back(), left
        repeat = core.repeat(0.0)
        assert repeat.is_repeat and [e.name for e in repeat.scheduled] == ["a/0", "b/0"]
        assert all(e.computed_before < held[e.name] and not e.new_block_ids for e in repeat.scheduled)
        answer(core, repeat)
    assert not core.has_grant()


@pytest.mark.parametrize("model", [{}, GROUPS, STATES, GROUPS | STATES])
@pytest.mark.parametrize("policy", GRANTING)
def test_steps_are_the_same_with_and_without_grants(policy: str, model: dict[str, Any]) -> None:
    """The same sequences, blocks and ends, step by step, as the requests end one after the other."""
    plans: dict[int, list[object]] = {}
    for most in (0, 15):
        core, repeats = core_of(policy, max_granted_steps=most, **model), 0
        for number, length in enumerate((70, 12, 33)):
            core.add(request(f"r{number}", num_prompt=5 + number, max_tokens=length))
        plans[most] = []
        while core.has_unfinished:
            is_granted = core.has_grant()
            [plan] = [core.repeat(0.0)] if is_granted else core.schedule(0.0)
            repeats += is_granted
            kept = plan.states.to_keep if plan.states is not None else []
            assert not (is_granted and kept)
            plans[most].append((plan.scheduled, plan.free_gpu, kept, core.block_tables()))
            answer(core, plan)
        assert (repeats > 30) == bool(most)
    assert plans[0] == plans[15]


def test_nothing_is_granted_while_something_else_could_be_wanted() -> None:
    """Prefills, and policies or settings without grants."""
    core = core_of()
    core.add(request("a"))
    [prefill] = core.schedule(0.0)
    assert prefill.grant is None
    answer(core, prefill)
    for core in (core_of(max_granted_steps=0), core_of("vllm-v0"), core_of("chitu")):
        core.add(request("a"))
        for _ in range(4):
            [plan] = core.schedule(0.0)
            assert plan.grant is None and not core.has_grant()
            answer(core, plan)


@pytest.mark.parametrize("change", ["arrival", "abort", "stop string"])
def test_what_takes_a_step_back(change: str) -> None:
    """An arrival, or the end of a row: the scheduler wants the next step back; a step that was begun is planned nevertheless.

    The next plan that is not a repeat says why, once.
    """
    why = Revocation.REQUEST_WAITS if change == "arrival" else Revocation.ROW_ENDED
    core = core_of()
    core.add(request("a"))
    core.add(request("b"))
    plan = granting_plan(core)
    assert core.has_grant() and not core.wants_step_back()
    if change == "arrival":
        core.add(request("c"))
    elif change == "abort":
        core.abort(["b"])
    else:
        core.stop_at("b/0", 1)
    assert core.wants_step_back() is why
    core.revoke()
    assert not (core.has_grant() or core.wants_step_back())
    answer(core, plan)
    repeat = core.repeat(0.0)
    assert [e.name for e in repeat.scheduled] == (["a/0", "b/0"] if change == "arrival" else ["a/0"])
    assert not core.wants_step_back() and repeat.revoked is None
    answer(core, repeat)
    [plan] = core.schedule(0.0)
    assert plan.revoked is why
    assert plan.left == ([] if change == "arrival" else ["b/0"])
    assert [e.name for e in plan.scheduled] == (["a/0", "b/0", "c/0"] if change == "arrival" else ["a/0"])
    answer(core, plan)
    assert core.schedule(0.0)[0].revoked is None


def first_grant_at(core: Scheduler, now: float) -> float:
    """When a plan grants steps again, planned every tenth of a second; granted steps are taken back."""
    while True:
        [plan] = core.schedule(now)
        answer(core, plan)
        if plan.grant is not None:
            return round(now, 1)
        now += 0.1


@pytest.mark.parametrize(("joins_at", "expected"), [(0.0, 2.0), (1.5, 3.5)])
def test_nothing_is_granted_while_requests_keep_arriving(joins_at: float, expected: float) -> None:
    """A request that revoked a grant begins a pause of two seconds, and each that joins within it prolongs it."""
    core = core_of()
    core.add(request("a"))
    answer(core, granting_plan(core))
    core.add(request("b"))
    core.revoke()
    [plan] = core.schedule(0.0)
    answer(core, plan)
    assert plan.revoked is Revocation.REQUEST_WAITS
    core.add(request("c"))
    answer(core, core.schedule(joins_at)[0])
    assert first_grant_at(core, joins_at) == expected


def test_a_row_that_ends_begins_no_pause() -> None:
    """Nobody waited for the revocation."""
    core = core_of()
    core.add(request("a"))
    core.add(request("b"))
    answer(core, granting_plan(core))
    core.abort(["b"])
    core.revoke()
    assert first_grant_at(core, 0.0) <= 0.2


def test_a_request_is_told_of_a_step_that_was_begun_by_a_grant() -> None:
    """Its timeline: it arrived, was not examined in a step that began before the revocation reached the worker, and ran."""
    core, timelines = core_of(), Timelines(lambda _: True)
    core.add(request("a"))
    plan = granting_plan(core)
    core.add(request("late"))
    core.revoke()
    answer(core, plan)
    for plans in (core.repeat, lambda now: core.schedule(now)[0]):
        following = plans(0.0)
        timelines.observe(following.events)
        answer(core, following)
    told = [(episode.reason, episode.queue, episode.from_step) for episode in timelines.episodes("late")]
    assert told == [
        (Reason.ARRIVED, "waiting", plan.step + 1),
        (Reason.STEP_GRANTED, "waiting", plan.step + 1),
        (Reason.RUNNING, "running", plan.step + 2),
    ]


def _lives(policy: str, num_lives: int, **model: bool) -> str:
    lives = [granting_life(policy, seed, **model) for seed in range(num_lives)]
    num_steps, num_repeats = (sum(getattr(life, name) for life in lives) for name in ("num_steps", "num_repeats"))
    assert num_repeats > num_steps / 10
    return f"grants under {policy}: {num_lives} lives, {num_steps} steps, of which {num_repeats} by grants"


@pytest.mark.parametrize("policy", GRANTING)
def test_lives_with_grants(policy: str, record_property: Record) -> None:
    """Whatever happens while steps are granted: every token once and as without grants, all blocks free at the end."""
    record_property("size", _lives(policy, 3))


@pytest.mark.parametrize("model", [{"grouped": True}, {"states": True}, {"grouped": True, "states": True}])
@pytest.mark.parametrize("policy", GRANTING)
def test_lives_with_grants_and_other_caches(policy: str, model: dict[str, bool], record_property: Record) -> None:
    """The same with cache groups or states: no granted step keeps a checkpoint."""
    record_property("size", _lives(policy, 3, **model))


@pytest.mark.long
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("policy", GRANTING)
def test_many_lives_with_grants(policy: str, record_property: Record) -> None:
    """The same in many more lives."""
    record_property("size", _lives(policy, 120))
