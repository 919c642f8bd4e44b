"""Chunked prefill under v0."""

import pytest

from scheduler_svc.core.request import SequenceStatus
from tests.support.core.v0_builders import (
    add,
    answer,
    chunks,
    finish,
    make_chunked,
    move_to_host,
    one_step,
    queues,
    steps,
)


def test_decodes_come_first_then_chunks_then_new_prompts() -> None:
    """R86: under one budget of 8 tokens."""
    core = make_chunked()
    add(core, "a", 3)
    add(core, "b", 11)
    add(core, "c", 4)
    assert [chunks(p) for p in steps(core, 3)] == [
        [("a", 3), ("b", 5)],
        [("c", 1), ("b", 6), ("a", 1)],
        [("c", 3), ("a", 1), ("b", 1)],
    ]


def test_groups_on_the_host_come_back_before_new_prompts_start() -> None:
    """R86: under the same budget; unlike without chunks they do not block prompts (R41)."""
    core = make_chunked()
    add(core, "a", 3)
    add(core, "b", 3)
    one_step(core)
    move_to_host(core, "b")
    add(core, "c", 20)
    plan, _ = one_step(core)
    assert chunks(plan) == [("c", 6), ("a", 1), ("b", 1)]
    assert plan.swap_in


def test_swapped_groups_that_do_not_fit_do_not_block_prompts() -> None:
    """R86, R202: only without chunks they do."""
    core = make_chunked(num_gpu_blocks=5)
    add(core, "a", 1)
    add(core, "b", 5)
    steps(core, 2)
    move_to_host(core, "b")
    core.state.swapped, kept = [], core.state.swapped
    add(core, "big", 14)
    one_step(core)
    core.state.swapped = kept
    core.abort(["a"])
    add(core, "tiny", 1, 1)
    plan, _ = one_step(core)
    assert (plan.swap_in, queues(core)["swapped"], ("tiny", 1) in chunks(plan)) == ([], ["b"], True)


def test_no_request_returns_in_a_step_that_preempted_but_prompts_may_start() -> None:
    """R71, R86."""
    core = make_chunked(num_gpu_blocks=6, num_cpu_blocks=9)
    for name in "abc":
        add(core, name, 2 if name == "c" else 3)
    add(core, "e", 9)
    steps(core, 2)
    move_to_host(core, "c")
    add(core, "tiny", 1)
    plan, _ = one_step(core)
    assert plan.preempted == [("e", "recompute")]
    assert (plan.swap_in, queues(core)["swapped"]) == ([], ["c"])
    assert chunks(plan) == [("tiny", 1), ("a", 1), ("b", 1)]


def test_adapters_fill_up_as_running_groups_are_scheduled() -> None:
    """R86: the set starts empty, so one that a running group no longer has room for is free; a new prompt sees those of all that
    were scheduled before it."""
    core = make_chunked(max_loras=1, max_num_batched_tokens=16)
    add(core, "a", 3, lora_id=1)
    one_step(core)
    add(core, "b", 3, lora_id=2)
    add(core, "c", 3, lora_id=1)
    assert chunks(one_step(core)[0]) == [("a", 1), ("c", 3)]
    assert queues(core)["waiting"] == ["b"]


def test_a_chunk_is_what_the_budget_leaves() -> None:
    """R87: min(uncomputed, left)."""
    core = make_chunked()
    add(core, "a", 19)
    seen = [(e.computed_before, e.num_tokens, e.samples) for p in steps(core, 4) for e in p.scheduled]
    assert seen == [(0, 8, False), (8, 8, False), (16, 3, True), (19, 1, True)]


def test_with_prefix_caching_a_chunk_is_whole_blocks() -> None:
    """R87: rounded down where the rest does not fit, and only there."""
    core = make_chunked(prefix_caching=True)
    add(core, "d", 2)
    one_step(core)
    add(core, "a", 15)
    assert [dict(chunks(p))["a"] for p in steps(core, 3)] == [4, 4, 7]


def test_groups_of_several_sequences_are_never_cut() -> None:
    """R87: computed again after a preemption, all their tokens go into one step where they fit one (`test_recompute_of_groups`)."""
    core = make_chunked(preemption_mode="recompute", num_gpu_blocks=5, max_num_batched_tokens=16)
    add(core, "a", 7, 3)
    add(core, "b", 6, 9, n=2)
    again = []
    while core.has_unfinished:
        plan, _ = one_step(core)
        again += [
            [e.num_tokens for e in plan.scheduled if e.request_id == "b" and e.is_prefill and not e.computed_before % 4]
        ]
    joint = [found for found in again if len(found) == 2]
    assert joint[0] == again[[bool(found) for found in again].index(True, 1)], "the first time it is computed again"
    for first, second in joint:
        assert second == first - 4, "the second shares the full block of the prompt"


def test_the_first_chunk_takes_the_blocks_of_the_whole_prompt() -> None:
    """R88: and a prompt that would not fit as a whole does not start."""
    core = make_chunked(num_gpu_blocks=9)
    add(core, "a", 19)
    [plan] = core.schedule(0)
    assert (chunks(plan), len(plan.scheduled[0].new_block_ids), plan.free_gpu) == ([("a", 8)], 5, 4)
    core.update(answer(core, plan))
    core.abort(["a"])
    add(core, "b", 3)
    one_step(core)
    add(core, "c", 36)
    assert chunks(one_step(core)[0]) == [("b", 1)]
    core.abort("bc")
    add(core, "d", 37)
    assert [e.status for e in one_step(core)[0].ended] == [SequenceStatus.FINISHED_IGNORED]


def test_orders_of_queue_and_batch() -> None:
    """R89: queue: swapped-in decodes, swapped-in prompts, decodes, chunks, new ones; batch: new ones, chunks, swapped-in prompts,
    decodes, swapped-in decodes; all three kinds of prompts count."""
    core = make_chunked(max_num_batched_tokens=24, num_gpu_blocks=40)
    add(core, "dec", 3)
    add(core, "back dec", 3)
    add(core, "back chunk", 25)
    one_step(core)
    move_to_host(core, "back chunk")
    move_to_host(core, "back dec")
    core.state.swapped, kept = [], core.state.swapped
    add(core, "chunk", 31)
    one_step(core)
    core.state.swapped = kept
    add(core, "new", 9)
    plan, _ = one_step(core)
    assert chunks(plan) == [("new", 7), ("chunk", 8), ("back chunk", 7), ("dec", 1), ("back dec", 1)]
    assert plan.num_prefill_groups == 3
    assert queues(core)["running"] == ["back dec", "back chunk", "dec", "chunk", "new"]


def test_no_token_before_the_last_chunk() -> None:
    """R90: a step that does not reach the end samples nothing, and the core takes none."""
    core = make_chunked()
    add(core, "a", 9, 2)
    outcomes = [one_step(core) for _ in range(3)]
    assert [[e.samples for e in plan.scheduled] for plan, _ in outcomes] == [[False], [True], [True]]
    assert [[run.token_ids != [] for run in outcome.runs] for _, outcome in outcomes] == [[], [True], [True]]


@pytest.mark.parametrize(("first", "expected"), [(3, [("a", 3), ("b", 5)]), (4, [("a", 4)])])
def test_with_several_steps_per_plan_prompts_are_not_cut(first: int, expected: list[tuple[str, int]]) -> None:
    """R91: they join decodes, but what is more than the budget left waits."""
    core = make_chunked(num_scheduler_steps=2)
    add(core, "a", first)
    add(core, "b", 5)
    assert chunks(one_step(core)[0]) == expected
    assert ("b" in queues(core)["waiting"]) == (len(expected) == 1)


def test_an_abort_between_chunks_frees_the_whole_prompt() -> None:
    """R198: mid-chunk, and while a chunk is executing."""
    for executing in (False, True):
        core = make_chunked()
        add(core, "a", 20)
        one_step(core)
        plans = core.schedule(0) if executing else []
        core.abort(["a"])
        for plan in plans:
            assert core.update(answer(core, plan)).runs == []
        assert core.pool_report().gpu.free == 20
        assert finish(core) == {}


def test_a_delay_does_not_wait_for_requests_that_have_their_share() -> None:
    """R57, R86: prompts come last, so by then only requests that the budget stopped are left in line."""
    core = make_chunked(delay_factor=100.0)
    add(core, "a", 3)
    one_step(core, 0.0)
    one_step(core, 5.0)
    add(core, "b", 3, arrival=5.0)
    assert chunks(one_step(core, 6.0)[0]) == [("b", 3), ("a", 1)]
