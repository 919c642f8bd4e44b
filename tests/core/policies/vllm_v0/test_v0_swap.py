"""How v0 moves groups to the host and back, and how victims leave."""

from dataclasses import replace

import pytest

from block_manager.cache_rules import AllocStatus
from scheduler_svc.core.errors import StepFailed
from scheduler_svc.core.request import SequenceStatus
from scheduler_svc.core.scheduler import Scheduler
from tests.support.core.v0_builders import (
    add,
    chunks,
    finish,
    make_chunked,
    make_v0,
    move_to_host,
    names,
    one_step,
    queues,
    steps,
    until,
)

BOTH = pytest.mark.parametrize("preset", ["vllm-v0", "vllm-2023"])


def swapped_core(preset: str = "vllm-v0", *, max_tokens: int = 20, **given) -> Scheduler:
    """`a` runs, `b` with three samples was just moved to the host."""
    core = make_v0(preset, **{"num_gpu_blocks": 9, **given})
    add(core, "a", 11, max_tokens)
    add(core, "b", 7, 4, n=3)
    until(core, "swap_out")
    assert queues(core) == {"waiting": [], "running": ["a"], "swapped": ["b"]}
    return core


@BOTH
def test_all_blocks_of_a_group_move_or_none(preset: str) -> None:
    """R73, R78, R101: those of all unfinished sequences, to the host; one map has the tables of all groups."""
    core = swapped_core(preset)
    assert {s.status for s in core.request("b").sequences} == {SequenceStatus.SWAPPED}
    tables = core.block_tables()
    assert {block[0] for name, table in tables.items() for block in table if name.startswith("b/")} == {"c"}
    assert {block[0] for block in tables["a/0"]} == {"g"}


@BOTH
def test_a_step_never_moves_both_ways(preset: str) -> None:
    """R3, R71: no request is swapped in in a step that swapped one out."""
    core = make_v0(preset, num_gpu_blocks=10)
    for i, name in enumerate("abcd"):
        add(core, name, 5 + i, 9, n=2)
    moves = [0, 0]
    for _ in range(200):
        plan, _ = one_step(core)
        assert not (plan.swap_in and plan.swap_out)
        assert not (plan.swap_in and plan.num_preempted)
        moves = [moves[0] + bool(plan.swap_in), moves[1] + bool(plan.swap_out)]
    assert not core.has_unfinished
    assert min(moves) > 0


@BOTH
def test_no_request_returns_in_a_step_that_preempted(preset: str) -> None:
    """R71: although the victim, which is computed again, left room enough; in the next step it does."""
    core = make_v0(preset, num_gpu_blocks=5)
    for name, length in (("a", 8), ("b", 8), ("c", 3)):
        add(core, name, length)
    one_step(core)
    move_to_host(core, "c")
    plan, _ = one_step(core)
    assert (plan.preempted, plan.swap_in, plan.free_gpu) == ([("b", "recompute")], [], 2)
    assert one_step(core)[0].swapped_in == {"c": 1}


@BOTH
def test_no_room_on_the_device_means_later(preset: str) -> None:
    """R69: the head of swapped stays, no request behind it returns, though there is room for one of them."""
    core = make_v0(preset, num_gpu_blocks=9)
    add(core, "a", 11)
    add(core, "c", 3)
    add(core, "b", 7, 6, n=3)
    until(core, "swap_out")
    move_to_host(core, "c")
    assert [core.state.cache.can_swap_in(g.live, 0) for g in core.state.swapped] == [AllocStatus.LATER, AllocStatus.OK]
    plan, _ = one_step(core)
    assert (chunks(plan), plan.swap_in, queues(core)["swapped"]) == ([("a", 1)], [], ["b", "c"])


@BOTH
def test_a_group_comes_back_to_run_in_the_same_step(preset: str) -> None:
    """R70: moved, running, with slots for its next tokens, one token each."""
    core = swapped_core(preset, max_tokens=5)
    plan = until(core, "swap_in")
    assert names(plan)[-3:] == ["b/0", "b/1", "b/2"]
    assert {e.num_tokens for e in plan.scheduled} == {1}
    assert plan.swapped_in == {"b": len(plan.swap_in)}
    assert queues(core)["swapped"] == []
    assert {s.status for s in core.request("b").sequences} == {SequenceStatus.RUNNING}
    finish(core)


def test_what_can_never_come_back_is_ignored() -> None:
    """R69: all its sequences end, their host blocks are freed, and the next one is looked at."""
    core = make_v0(num_gpu_blocks=9)
    add(core, "a", 4, 12)
    add(core, "b", 15, 40, n=3)
    until(core, "swap_out")
    add(core, "c", 3, 2)
    ended = []
    for _ in range(120):
        plan, _ = one_step(core)
        ended += [(e.request_id, e.status) for e in plan.ended]
    assert ended == [("b", SequenceStatus.FINISHED_IGNORED)] * 3
    assert not core.has_unfinished
    assert core.pool_report().cpu.free == 20


def test_one_whose_adapter_has_no_slot_is_passed_over() -> None:
    """R70: as with prompts; those behind it come back, it stays in front of swapped."""
    core = make_v0(num_gpu_blocks=40, max_loras=1)
    for name in "abcde":
        add(core, name, 3, lora_id=1)
    one_step(core)
    for name in "bcde":
        move_to_host(core, name)
    for group, lora in zip(core.state.swapped, (2, 3, 1, 1), strict=True):
        group.request.lora_id = lora
    core.state.limits = replace(core.state.limits, max_num_seqs=2)
    plan, _ = one_step(core)
    assert plan.swapped_in == {"d": 1}
    assert queues(core) == {"waiting": [], "running": ["a", "d"], "swapped": ["b", "c", "e"]}


@pytest.mark.parametrize(("limit", "comes"), [(3, False), (4, True)])
def test_sequences_of_a_group_that_comes_back_count(limit: int, comes: bool) -> None:
    """R70: all of them, with those that run."""
    core = make_v0(num_gpu_blocks=40, max_num_seqs=4)
    add(core, "a", 3, n=2)
    add(core, "b", 3, n=2)
    steps(core, 2)
    move_to_host(core, "b")
    core.state.limits = replace(core.state.limits, max_num_seqs=limit)
    assert bool(one_step(core)[0].swap_in) is comes


@pytest.mark.parametrize(("watermark", "comes"), [(0, True), (1, False)])
def test_the_room_needed_is_blocks_and_what_is_written_next(watermark: int, comes: bool) -> None:
    """R72: the 2023 rule wants one block more for each sequence, and what stays free must reach the watermark."""
    core = make_v0("vllm-2023", num_gpu_blocks=9, watermark_blocks=watermark)
    add(core, "a", 13)
    add(core, "b", 13)
    one_step(core)
    move_to_host(core, "b")
    assert core.state.cache.num_free_gpu == len(core.block_tables()["b/0"]) + 1
    assert bool(one_step(core)[0].swap_in) is comes


@pytest.mark.parametrize("defects", ["repaired", "recorded"])
def test_without_room_on_the_host(defects: str) -> None:
    """R75: the step fails by type as in the recordings, or the group is computed again; never anything between."""
    core = make_v0(num_gpu_blocks=9, num_cpu_blocks=2, defects=defects)
    add(core, "a", 11)
    add(core, "b", 7, n=3)
    if defects == "recorded":
        with pytest.raises(StepFailed) as caught:
            steps(core, 9)
        assert (caught.value.request_id, caught.value.reason) == ("b", "CPU_SWAP_SPACE")
        return
    plan = until(core, "preempted")
    assert plan.preempted == [("b", "recompute")]
    assert queues(core) == {"waiting": ["b"], "running": ["a"], "swapped": []}


@pytest.mark.parametrize(
    ("mode", "n", "prompt", "expected"),
    [
        (None, 1, 40, "recompute"),
        (None, 2, 3, "swap"),
        ("recompute", 2, 3, "recompute"),
        ("swap", 1, 40, "swap"),
        ("swap", 2, 3, "swap"),
    ],
)
def test_how_a_victim_leaves(mode: str | None, n: int, prompt: int, expected: str) -> None:
    """R76, R79: as the operator says, else by the number of sequences, however many blocks they hold (S0's reason, that those
    that use little are computed again, is loose)."""
    core = make_v0(num_gpu_blocks=1 + -(-prompt // 4), preemption_mode=mode)
    add(core, "a", 4)
    add(core, "b", prompt, n=n)
    assert [p.preempted for p in steps(core, 2)] == [[], [("b", expected)]]


def test_one_survivor_of_several_samples_is_computed_again() -> None:
    """R76, R199: the mode goes by sequences that are alive."""
    core = make_v0(num_gpu_blocks=6)
    add(core, "a", 8)
    add(core, "b", 8, n=2)
    one_step(core)
    core.stop_at("b/0", 1)
    plan = until(core, "preempted")
    assert plan.preempted == [("b", "recompute")]


def test_recompute_frees_and_waits_in_front() -> None:
    """R77: blocks free, nothing computed, tokens kept, before all that wait."""
    core = make_v0(num_gpu_blocks=4)
    add(core, "a", 7)
    add(core, "b", 7)
    one_step(core)
    add(core, "c", 5)
    until(core, "preempted")
    sequence = core.request("b").sequences[0]
    assert queues(core)["waiting"] == ["b", "c"]
    assert (sequence.num_computed_tokens, sequence.num_output_tokens, sequence.num_preemptions) == (0, 1, 1)
    assert "b/0" not in core.block_tables()


def test_swapped_groups_queue_in_the_order_in_which_they_left() -> None:
    """R44, R78: the tail of swapped."""
    core = make_v0(num_gpu_blocks=8, preemption_mode="swap")
    for name, length in (("a", 8), ("b", 8), ("c", 8), ("d", 5)):
        add(core, name, length)
    plan = steps(core, 2)[1]
    assert plan.preempted == [("d", "swap"), ("c", "swap")]
    assert queues(core)["swapped"] == ["d", "c"]


@pytest.mark.parametrize(("prompt", "expected"), [(16, [("a", 8)]), (17, [])])
def test_an_unfinished_chunk_comes_back_as_a_whole(prompt: int, expected: list[tuple[str, int]]) -> None:
    """R70, R86: the swapped phase knows no chunks: all remaining tokens within the budget or not at all, as a prompt."""
    core = make_chunked()
    add(core, "a", prompt)
    one_step(core)
    move_to_host(core, "a")
    plan, _ = one_step(core)
    assert (chunks(plan), plan.num_prefill_groups, bool(plan.swap_in)) == (expected, len(expected), bool(expected))
