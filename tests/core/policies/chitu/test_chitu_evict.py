"""Chitu's congestion control: evictions, the adaptive threshold, and what does not fit at all (R171, R173-R175, R182)."""

import pytest

from scheduler_svc.core.errors import TaskDoesNotFit
from scheduler_svc.core.plan import StepResult
from scheduler_svc.core.request import QueueKind, SequenceStatus
from scheduler_svc.core.request_rules import BeamRules
from tests.support.core.task_builders import Tasks, ids


def crowded(num_blocks: int = 6, **knobs: object) -> Tasks:
    """Three tasks that fill the pool with their prompts: a, b and c, the later the less important."""
    tasks = Tasks(scheduler_type="prefill_first,request_preset", num_blocks=num_blocks, **knobs)
    for name, priority in (("a", 3), ("b", 2), ("c", 1)):
        tasks.add(name, 8, max_tokens=12, priority=priority)
    assert ids(tasks.step()) == ["a", "b", "c"]
    return tasks


def test_the_last_in_score_order_is_evicted_until_the_rest_fits() -> None:
    """R173: free blocks are counted without the threshold; one victim makes room for two."""
    tasks = crowded()
    assert ids(tasks.step()) == ["a", "b"]
    assert tasks["evicted"] == [("c", 3)] and tasks["fallback"] is False
    assert tasks.core.pool_report().gpu.free == 0


def test_capacity_is_checked_over_all_before_the_cut() -> None:
    """R173: c would not have run in this batch, and is evicted all the same."""
    tasks = crowded(max_decode_tasks=1)
    assert ids(tasks.step()) == ["a"]
    assert tasks["evicted"] == [("c", 3)]


def test_an_evicted_task_starts_anew_with_its_tokens() -> None:
    """R174: blocks free, prefill again from 0 over prompt and output, no group; its tokens count on for max_tokens."""
    tasks = crowded()
    tasks.step()
    group = tasks.group("c")
    [sequence] = group.live
    assert (group.in_prefill, group.lane, group.place) == (True, None, QueueKind.WAITING)
    assert (sequence.num_computed_tokens, sequence.prefill_end, sequence.num_output_tokens) == (0, 9, 1)
    assert "c/0" not in tasks.core.block_tables() and tasks.plans[0].left == ["c/0"]
    again = [share for step in tasks.run() for share in step if share[0] == "c"]
    assert again[0] == ("c", "P", 0, 9)
    assert sum(kind == "D" for _, kind, _, _ in again) == 10


def test_each_eviction_halves_the_threshold() -> None:
    """R174: from its value of that moment, once per victim, never below one."""
    tasks = Tasks(scheduler_type="prefill_first,request_preset", num_blocks=8, max_num_seqs=16)
    for i in range(8):
        tasks.add(f"t{i}", 4, max_tokens=9, priority=9 - i)
    tasks.step()
    assert len(tasks.step()) == 4
    assert tasks["evicted"] == [("t7", 4), ("t6", 2), ("t5", 1), ("t4", 1)]


def test_the_threshold_bounds_prompts_only() -> None:
    """R170, R174: blocks are free, and a lowered threshold keeps a prompt out that takes one of them; decodes take it."""
    tasks = crowded(num_blocks=8)
    assert ids(tasks.step(eos=("b",))) == ["a", "b"] and tasks["evicted"] == [("c", 4)]
    tasks = crowded(num_blocks=8)
    tasks.step()
    tasks.add("new", 4, priority=9)
    assert tasks.core.pool_report().gpu.free == 2
    assert ids(tasks.step()) == ["a", "b"] and tasks["fallback"] is True
    for _ in range(3):
        tasks.step()
    assert tasks.core.pool_report().gpu.free == 0 and tasks["threshold"] == 4


def test_one_that_finishes_brings_the_threshold_back() -> None:
    """R175: in one go, whichever task it is and whether by EOS or length."""
    tasks = crowded()
    tasks.step()
    assert tasks["threshold"] == 3
    tasks.step(eos=("b",))
    assert tasks["threshold"] == 6
    assert ids(tasks.step()) == ["c"]


def test_a_prompt_larger_than_the_cache_fails_as_recorded() -> None:
    """R171: nothing selected although no block is in use. The first chunk counts, where there are chunks."""
    tasks = Tasks(num_blocks=4, defects="recorded")
    tasks.add("a", 17)
    with pytest.raises(TaskDoesNotFit) as error:
        tasks.plan()
    assert (error.value.kind, error.value.num_tokens, error.value.evicted) == ("prefill_does_not_fit", 17, [])
    tasks = Tasks(num_blocks=4, defects="recorded", prefill_chunk_size=8)
    tasks.add("a", 17)
    assert ids(tasks.step()) == ["a"]


def test_a_decode_larger_than_the_cache_fails_as_recorded() -> None:
    """R173: the only one that is ready needs more than there is."""
    tasks = Tasks(num_blocks=2, defects="recorded")
    tasks.add("a", 6, max_tokens=9)
    for _ in range(3):
        tasks.step()
    with pytest.raises(TaskDoesNotFit) as error:
        tasks.plan()
    assert (error.value.kind, error.value.num_tokens) == ("decode_cannot_finish", 9)


def test_what_cannot_fit_ends_alone() -> None:
    """R171, R173, R182: as served, it ends with "length" and a reason, and others are served."""
    tasks = Tasks(num_blocks=2)
    tasks.add("a", 6, max_tokens=9)
    tasks.add("b", 3, max_tokens=2)
    ended = []
    while tasks.core.has_unfinished:
        tasks.plan()
        ended += [*tasks.plans[0].ended, *tasks.finish().ended]
    by_id = {e.request_id: e for e in ended}
    assert (by_id["a"].status, by_id["a"].num_output_tokens) == (SequenceStatus.FINISHED_IGNORED, 3)
    assert "more blocks than the cache has" in str(by_id["a"].error)
    assert by_id["b"].status is SequenceStatus.FINISHED_LENGTH_CAPPED


def test_beams_are_evicted_and_come_back_together() -> None:
    """R174, R28: all sequences of a group leave and prefill anew; they sample together again."""
    tasks = Tasks(scheduler_type="prefill_first,request_preset", num_blocks=8, max_num_seqs=4)
    beam = BeamRules()
    tasks.add("a", 8, max_tokens=20, priority=2)
    tasks.core.add(tasks.request("wide", 6, 12, priority=1, n=2, beam=beam))
    tasks.plan()
    plan = tasks.plans[0]
    candidates = {"wide/0": [(11, -0.1), (12, -0.2), (13, -0.3), (14, -0.4)]}
    tasks.core.update(StepResult(plan.step, {"a/0": [5]}, candidates=candidates))
    assert len(tasks.core.block_tables()) == 3
    evicted = False
    for _ in range(60):
        if not tasks.core.has_unfinished:
            break
        tasks.plan()
        [plan] = tasks.plans
        evicted = evicted or bool(plan.preempted)
        names = [e.name for e in plan.scheduled if e.samples]
        wide = [name for name in names if name.startswith("wide")]
        assert len(wide) in (0, 2) or len(tasks.group("wide").live) == len(wide)
        guesses = {name: [(20 + 4 * i + k, -0.1 * (k + 1)) for k in range(4)] for i, name in enumerate(wide)}
        tasks.core.update(StepResult(plan.step, {"a/0": [5]} if "a/0" in names else {}, candidates=guesses))
        assert tasks.core.check_integrity() == []
    assert evicted and not tasks.core.has_unfinished
