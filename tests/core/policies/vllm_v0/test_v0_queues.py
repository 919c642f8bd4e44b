"""Queues of v0, what a step is made of, and how the queues are put together again."""

import pytest

from scheduler_svc.core.request import SequenceStatus
from tests.support.core.v0_builders import (
    add,
    answer,
    chunks,
    finish,
    group_of,
    make_chunked,
    make_v0,
    names,
    one_step,
    queues,
    steps,
    until,
)


def test_newcomers_go_to_the_tail_of_waiting() -> None:
    """R4, R31: three queues, and a request starts in the first."""
    core = make_v0()
    for name in "abc":
        add(core, name, 3)
    assert queues(core) == {"waiting": ["a", "b", "c"], "running": [], "swapped": []}


def test_after_its_prefill_a_group_is_in_running() -> None:
    """R31, R32: the prose of S0 keeps it in waiting until it decodes, which is wrong; rule: R44."""
    core = make_v0()
    add(core, "a", 3)
    [plan] = core.schedule(0)
    assert queues(core) == {"waiting": [], "running": ["a"], "swapped": []}
    core.update(answer(core, plan))
    assert queues(core)["running"] == ["a"]


def test_a_fresh_core_has_run_no_prompt_and_tells_endings_once() -> None:
    """R33, R36: no delay is known before the first prompt step; finished requests are told with the next plan only."""
    core = make_v0(delay_factor=100.0)
    add(core, "a", 3, 1, arrival=5.0)
    [plan] = core.schedule(5.0)
    assert (chunks(plan), plan.finished) == ([("a", 3)], [])
    core.update(answer(core, plan))
    add(core, "b", 3)
    assert [p.finished for p in steps(core, 2)] == [["a"], []]


def test_models_without_a_cache_take_no_blocks() -> None:
    """R34: with the placeholder everything fits at once, whatever the numbers of blocks are."""
    core = make_v0(cache="none", num_gpu_blocks=1, num_cpu_blocks=0)
    for name in "abc":
        add(core, name, 20, 3)
    assert chunks(one_step(core)[0]) == [("a", 20), ("b", 20), ("c", 20)]
    assert core.block_tables() == {name: [] for name in ("a/0", "b/0", "c/0")}
    assert {len(tokens) for tokens in finish(core).values()} == {2}, "after the first ones"


@pytest.mark.parametrize("where", ["waiting", "running", "swapped"])
def test_abort_finds_a_group_in_each_queue(where: str) -> None:
    """R35, R198: removed, all unfinished sequences aborted, blocks free, told as finished; unknown ids are ignored."""
    core = make_v0(num_gpu_blocks=9)
    add(core, "a", 11)
    request = add(core, "x", 7, n=3)
    if where != "waiting":
        one_step(core)
    if where == "swapped":
        until(core, "swap_out")
    assert queues(core)[where][-1] == "x"
    live = len(request.unfinished)
    ended = core.abort(["nobody", "x", "x"])
    assert [e.status for e in ended] == [SequenceStatus.FINISHED_ABORTED] * live
    assert not any("x" in queue for queue in queues(core).values())
    assert not [name for name in core.block_tables() if name.startswith("x/")]
    assert core.check_integrity() == []
    assert one_step(core)[0].finished == ["x"]
    assert core.abort(["x"]) == []


def test_unfinished_groups_of_all_queues_count() -> None:
    """R36: in waiting, running and swapped."""
    core = make_v0(num_gpu_blocks=9)
    assert (core.has_unfinished, core.num_unfinished_groups) == (False, 0)
    add(core, "a", 11)
    add(core, "b", 7, n=3)
    until(core, "swap_out")
    add(core, "c", 3)
    assert [len(queue) for queue in queues(core).values()] == [1, 1, 1]
    assert (core.has_unfinished, core.num_unfinished_groups) == (True, 3)
    core.abort("abc")
    assert (core.has_unfinished, core.num_unfinished_groups) == (False, 0)


def test_prompts_come_before_decodes_and_never_beside_them() -> None:
    """R40, R41: a step is all prompts or all decodes; decodes stand still while prompts start."""
    core = make_v0()
    add(core, "a", 3)
    one_step(core)
    add(core, "b", 5)
    assert [chunks(p) for p in steps(core, 2)] == [[("b", 5)], [("a", 1), ("b", 1)]]


def test_swapped_groups_block_new_prompts() -> None:
    """R40, R41, R202: while a request is swapped out no prompt starts, though there is room; groups of several sequences
    outrank those that wait by that."""
    core = make_v0(num_gpu_blocks=9)
    add(core, "a", 11)
    add(core, "b", 7, 4, n=3)
    until(core, "swap_out")
    add(core, "tiny", 1, 1)
    seen = []
    while queues(core)["swapped"]:
        plan, _ = one_step(core)
        seen += [(plan.num_prefill_groups, plan.free_gpu > 0)]
    assert (0, True) in seen[:-1]
    assert {num for num, _ in seen} == {0}
    assert chunks(until(core, "num_prefill_groups")) == [("tiny", 1)]


def test_a_step_stays_within_both_limits() -> None:
    """R43: sequences and tokens of every step, prompts of several samples included."""
    core = make_v0(max_num_seqs=5, max_num_batched_tokens=16, max_model_len=16, num_gpu_blocks=60)
    for i, name in enumerate("abcdefgh"):
        add(core, name, 4 + i % 3, 3, n=1 + i % 3)
    for _ in range(60):
        plan, _ = one_step(core)
        assert plan.num_batched_tokens <= 16
        assert core.state.num_running_seqs <= 5
        assert len(plan.scheduled) <= 5
    assert not core.has_unfinished


def test_victims_wait_in_the_order_in_which_they_ran() -> None:
    """R44: the tail leaves first and each victim goes to the front, so their order is as it was, before newcomers."""
    core = make_v0(num_gpu_blocks=8)
    for name, length in (("a", 8), ("b", 8), ("c", 7), ("d", 5)):
        add(core, name, length)
    one_step(core)
    add(core, "new", 30)
    plan, _ = one_step(core)
    assert plan.preempted == [("d", "recompute"), ("c", "recompute")]
    assert queues(core) == {"waiting": ["c", "d", "new"], "running": ["a", "b"], "swapped": []}


def test_prompts_join_behind_those_that_run() -> None:
    """R44: the running queue is untouched by a prompt step and prompts are appended in their order."""
    core = make_v0()
    for name in "ab":
        add(core, name, 3)
    one_step(core)
    for name in "cd":
        add(core, name, 3)
    one_step(core)
    assert queues(core)["running"] == ["a", "b", "c", "d"]


def test_groups_that_come_back_join_behind_the_decodes() -> None:
    """R44, R46: swapped-in groups are scheduled and queued behind the running ones."""
    core = make_v0(num_gpu_blocks=9)
    add(core, "a", 11, 9)
    add(core, "b", 7, n=3)
    until(core, "swap_out")
    add(core, "c", 3)
    plan = until(core, "swap_in")
    assert names(plan)[-3:] == ["b/0", "b/1", "b/2"]
    assert queues(core)["running"][-1] == "b"


def test_groups_that_the_budget_left_over_stay_in_front() -> None:
    """R45: they were not taken off the queue, so they precede the scheduled ones."""
    core = make_chunked(prefix_caching=True)
    add(core, "d", 3)
    one_step(core)
    add(core, "x", 30)
    add(core, "y", 3)
    assert chunks(one_step(core)[0]) == [("x", 4), ("y", 3), ("d", 1)]
    assert queues(core)["running"] == ["d", "x", "y"]
    core.abort(["d"])
    assert chunks(one_step(core)[0]) == [("x", 8)]
    assert queues(core)["running"] == ["y", "x"]
    assert chunks(one_step(core)[0]) == [("x", 4), ("y", 1)]


def test_a_plan_says_what_the_step_is_made_of() -> None:
    """R46: prompt groups, tokens, queue sizes after the merge, victims of both kinds, ignored ones, lookahead slots."""
    core = make_v0(num_gpu_blocks=9, num_lookahead_slots=1)
    add(core, "a", 11)
    add(core, "long", 65)
    add(core, "b", 7, n=3)
    first, _ = one_step(core)
    assert (first.num_prefill_groups, first.num_batched_tokens, first.num_running) == (2, 18, 2)
    assert ([e.name for e in first.ended], first.num_lookahead_slots) == (["long/0"], 0)
    plan = until(core, "preempted")
    assert (plan.num_prefill_groups, plan.num_batched_tokens, plan.num_lookahead_slots) == (0, 1, 1)
    assert (plan.num_waiting, plan.num_running, plan.num_swapped, plan.num_preempted) == (0, 1, 1, 1)


def test_ignored_groups_are_no_work() -> None:
    """R5, R6: a step without scheduled groups and moves is empty although it ends a request."""
    core = make_v0()
    add(core, "long", 65)
    [plan] = core.schedule(0)
    assert (plan.is_empty, [e.request_id for e in plan.ended]) == (True, ["long"])
    add(core, "a", 3)
    [plan] = core.schedule(0)
    assert not plan.is_empty


def test_with_adapters_the_batch_is_sorted_by_adapter() -> None:
    """R47: by (adapter, request id); without any it keeps the queue's order."""
    core = make_v0()
    for name, lora in (("z", 2), ("y", 0), ("x", 1), ("w", 2)):
        add(core, name, 3, lora_id=lora)
    assert [p.scheduled and names(p) for p in steps(core, 2)] == [["y/0", "x/0", "w/0", "z/0"]] * 2
    assert queues(core)["running"] == ["z", "y", "x", "w"]
    plain = make_v0()
    for name in "zyx":
        add(plain, name, 3)
    assert names(one_step(plain)[0]) == ["z/0", "y/0", "x/0"]


def test_preemptions_are_counted_since_the_start() -> None:
    """R80: what the running service numbers its warnings by; priority preemptions and those of one step count each."""
    core = make_v0(num_gpu_blocks=8)
    for name, length in (("a", 8), ("b", 8), ("c", 7), ("d", 5)):
        add(core, name, length)
    counts = [(len(p.preempted), p.num_cumulative_preemptions) for p in steps(core, 2)]
    assert counts == [(0, 0), (2, 2)]
    core.abort("acd")
    add(core, "e", 20)
    plan = until(core, "preempted")
    assert plan.num_cumulative_preemptions == 3
    assert group_of(core, "e") is not None
