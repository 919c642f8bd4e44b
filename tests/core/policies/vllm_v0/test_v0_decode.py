"""How v0 lets running groups go on."""

import pytest

from scheduler_svc.core.parts.budget import StepBudget
from scheduler_svc.core.plan import StepResult
from scheduler_svc.core.plan_builder import PlanBuilder
from scheduler_svc.core.request import SequenceStatus
from scheduler_svc.core.scheduler import Scheduler
from tests.support.core.v0_builders import (
    add,
    chunks,
    finish,
    make_chunked,
    make_v0,
    names,
    one_step,
    queues,
    steps,
    until,
)


def decode(core: Scheduler, token_budget: int = 64) -> PlanBuilder:
    """A step planned by the phases alone, so that its budget can be looked at."""
    builder = PlanBuilder(0.0, StepBudget(token_budget, core.state.limits.max_num_seqs))
    for phase in core.workers[0]._phases:
        phase.run(core.state, builder)
    return builder


def test_each_running_sequence_gets_a_token() -> None:
    """R58, R62: in the order of the queue, one per sequence whatever the group's size."""
    core = make_v0()
    add(core, "a", 3, n=2)
    add(core, "b", 5)
    plan = steps(core, 2)[1]
    assert chunks(plan) == [("a", 1), ("a", 1), ("b", 1)]
    assert (plan.num_batched_tokens, [e.is_prefill for e in plan.scheduled]) == (3, [False] * 3)


def test_a_chunk_that_the_budget_cannot_hold_stops_the_queue() -> None:
    """R58: 0 tokens left is the end; requests behind it do not run either."""
    core = make_chunked()
    add(core, "a", 20)
    add(core, "b", 20)
    one_step(core)
    assert [chunks(p) for p in steps(core, 2)] == [[("a", 8)], [("b", 4), ("a", 4)]]


class TestLateOutputs:
    """Stop rules handled one step late (async_output)."""

    def test_a_finished_sequence_runs_once_more(self) -> None:
        """R33, R59: its end comes out one step later, and what that extra run gives is thrown away."""
        core = make_v0(async_output=True)
        add(core, "a", 3, 2)
        seen = [(chunks(p), [len(r.token_ids) for r in o.runs], [e.name for e in o.ended]) for p, o in _steps(core, 3)]
        assert seen == [([("a", 3)], [1], []), ([("a", 1)], [1], []), ([("a", 1)], [], ["a/0"])]

    def test_one_beyond_the_models_length_does_not_run_again(self) -> None:
        """R59: it is set aside instead, told as late, and neither waits nor runs while its end is handled."""
        core = make_v0(async_output=True, max_model_len=8, max_num_batched_tokens=8)
        add(core, "a", 7)
        add(core, "b", 1)
        plans = [p for p, _ in _steps(core, 3)]
        assert [p.late for p in plans] == [[], [], ["a"]]
        assert names(plans[2]) == ["b/0"]
        assert (queues(core)["running"], core.request("a")) == (["b"], None)

    def test_a_victim_that_is_over_is_freed_instead_of_preempted(self) -> None:
        """R60: what is open of it is handled first; its blocks count as free, and it is no preemption."""
        core = make_v0(async_output=True, num_gpu_blocks=4)
        add(core, "a", 8)
        add(core, "b", 8, 1)
        one_step(core)
        [plan] = core.schedule(0)
        assert [(e.name, e.status) for e in plan.ended] == [("b/0", SequenceStatus.FINISHED_LENGTH_CAPPED)]
        assert (plan.preempted, plan.num_preempted, names(plan)) == ([], 0, ["a/0"])

    def test_a_victim_that_goes_on_is_preempted_with_its_token(self) -> None:
        """R60: handling what is open does not end it, so it waits with the token that it got."""
        core = make_v0(async_output=True, num_gpu_blocks=4)
        add(core, "a", 8)
        add(core, "b", 8)
        one_step(core)
        plan, _ = one_step(core)
        assert plan.preempted == [("b", "recompute")]
        assert core.request("b").sequences[0].num_output_tokens == 1


def _steps(core: Scheduler, num: int):
    return [one_step(core) for _ in range(num)]


def test_the_tail_leaves_until_the_head_has_its_slots() -> None:
    """R60: one victim after the other, d for a's samples and c for b; the request that is served stays."""
    core = make_v0(num_gpu_blocks=8)
    add(core, "a", 16, n=2)
    add(core, "b", 3)
    add(core, "c", 3)
    add(core, "d", 3)
    one_step(core)
    plan, _ = one_step(core)
    assert plan.preempted == [("d", "recompute"), ("c", "recompute")]
    assert chunks(plan) == [("a", 1), ("a", 1), ("b", 1)]


def test_alone_a_group_is_its_own_victim_and_gets_no_slots() -> None:
    """R60, R61, R197: S0's simplified code would append slots even then; the step is empty and it starts again later."""
    core = make_v0(num_gpu_blocks=3)
    add(core, "a", 11)
    one_step(core)
    [plan] = core.schedule(0)
    assert (plan.preempted, plan.scheduled, plan.is_empty, plan.free_gpu) == ([("a", "recompute")], [], True, 3)
    assert core.block_tables() == {}
    assert queues(core) == {"waiting": ["a"], "running": [], "swapped": []}


def test_victims_are_not_taken_off_the_budget() -> None:
    """R61: only the head that is short is, and once however many leave for it."""
    core = make_v0(num_gpu_blocks=7, num_lookahead_slots=5)
    add(core, "a", 20)
    add(core, "b", 3, n=2)
    add(core, "c", 3, n=2)
    one_step(core)
    builder = decode(core)
    assert builder.preempted == [("c", "swap"), ("b", "swap")]
    assert builder.budget.num_seqs == 1 + 2 + 2 - 1


def test_slots_for_one_token_and_copies_of_shared_blocks() -> None:
    """R62, R67, R3: samples share the prompt's last block: the first writers copy it, the last one writes in place; pairs are in
    the plan."""
    core = make_v0()
    add(core, "a", 6, n=3)
    one_step(core)
    shared = core.block_tables()["a/0"]
    assert core.block_tables() == dict.fromkeys(("a/0", "a/1", "a/2"), shared)
    [plan] = core.schedule(0)
    tables = core.block_tables()
    assert [source for source, _ in plan.copy] == [int(shared[1][1:])] * 2
    assert [f"g{target}" for _, target in plan.copy] == [tables["a/0"][1], tables["a/1"][1]]
    assert tables["a/2"] == shared
    assert len({table[1] for table in tables.values()}) == 3


@pytest.mark.parametrize("preset", ["vllm-v0", "vllm-2023"])
def test_a_block_is_taken_when_a_token_needs_it(preset: str) -> None:
    """R16, R67: the table grows by one block when the last one is full, not before."""
    core = make_v0(preset)
    add(core, "a", 4)
    sizes = []
    for _ in range(6):
        one_step(core)
        sizes.append(len(core.block_tables()["a/0"]))
    assert sizes == [1, 2, 2, 2, 2, 3]


def test_the_2023_rule_wants_a_free_block_for_every_sequence() -> None:
    """R65: whether it needs one or not; in 0.6.3 a block that is touched counts, which for a decode is the same (R66)."""
    for preset in ("vllm-2023", "vllm-v0"):
        core = make_v0(preset, num_gpu_blocks=3)
        add(core, "a", 6)
        add(core, "b", 3)
        one_step(core)
        assert one_step(core)[0].preempted == [("b", "recompute")]


def test_decodes_do_not_ask_the_token_budget() -> None:
    """R63: their tokens are added to it, that is all; only chunks are cut by it."""
    core = make_v0()
    for name in "abc":
        add(core, name, 3)
    one_step(core)
    builder = decode(core, token_budget=2)
    assert (list(builder.entries), builder.budget.num_tokens) == (["a/0", "b/0", "c/0"], 3)


@pytest.mark.parametrize("preset", ["vllm-v0", "vllm-2023"])
def test_running_groups_are_not_sorted_by_arrival(preset: str) -> None:
    """R63, R64: the order is that of the queue; the policy object of 2023 that sorted by arrival is documented, not built."""
    core = make_v0(preset, num_gpu_blocks=4)
    add(core, "late", 7, arrival=9.0)
    add(core, "early", 7, arrival=1.0)
    assert names(one_step(core)[0]) == ["late/0", "early/0"]
    plan = until(core, "preempted")
    assert plan.preempted == [("early", "recompute")]


def test_lookahead_slots_are_kept_behind_decodes_alone() -> None:
    """R68: none for a prompt, the configured ones for a decode; blocks are those of tokens and slots."""
    core = make_v0(num_lookahead_slots=5)
    add(core, "a", 7)
    seen = []
    for _ in range(3):
        plan, _ = one_step(core)
        seen.append((plan.num_lookahead_slots, len(core.block_tables()["a/0"])))
    assert seen == [(0, 2), (5, 4), (5, 4)]


@pytest.mark.parametrize(("num_blocks", "ignored"), [(2, ["a"]), (3, [])])
def test_with_several_steps_per_plan_a_chunked_prompt_must_have_room_for_slots(
    num_blocks: int, ignored: list[str]
) -> None:
    """R68, R91: the configured number and one behind its 4 tokens."""
    core = make_chunked(num_lookahead_slots=4, num_scheduler_steps=5, num_gpu_blocks=num_blocks)
    add(core, "a", 4)
    assert [e.request_id for e in one_step(core)[0].ended] == ignored


def test_everything_ends_and_everything_is_free() -> None:
    """R17, R44, R200: with victims of both kinds on the way."""
    core = make_v0(num_gpu_blocks=10)
    for i, name in enumerate("abcde"):
        add(core, name, 4 + i, 9, n=1 + i % 2)
    tokens = finish(core)
    assert {len(found) for found in tokens.values()} == {9}
    assert len(tokens) == 7
    assert core.state.shared.num_cumulative_preemptions > 0


def test_a_result_without_requests_is_nothing() -> None:
    """R5: a step without requests gives no output."""
    core = make_v0()
    add(core, "a", 3)
    [plan] = core.schedule(0)
    core.abort(["a"])
    outcome = core.update(StepResult(plan.step, {"a/0": [5]}))
    assert (outcome.runs, outcome.ended) == ([], [])
