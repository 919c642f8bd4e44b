"""Priorities under v0."""

from scheduler_svc.core.request import SequenceStatus
from scheduler_svc.core.scheduler import Scheduler
from tests.support.core.v0_builders import add, chunks, finish, make_v0, names, one_step, queues, steps


def make_core(**given) -> Scheduler:
    return make_v0(policy="priority", **{"num_gpu_blocks": 6, **given})


def test_smaller_numbers_then_earlier_arrivals_come_first() -> None:
    """R24, R81: both queues are ordered by (priority, arrival) in a step that starts no prompt."""
    core = make_core(num_gpu_blocks=20, max_num_seqs=3)
    for name, priority, arrival in (("a", 2, 1.0), ("b", 1, 2.0), ("c", 1, 1.5)):
        add(core, name, 3, priority=priority, arrival=arrival)
    one_step(core)
    for name, priority, arrival in (("w", 9, 5.0), ("x", 3, 4.0), ("y", 3, 3.0)):
        add(core, name, 3, priority=priority, arrival=arrival)
    plan, _ = one_step(core)
    assert names(plan) == ["c/0", "b/0", "a/0"]
    assert queues(core) == {"waiting": ["y", "x", "w"], "running": ["c", "b", "a"], "swapped": []}


def test_the_least_important_makes_room_for_one_that_does_not_fit() -> None:
    """R82, R85: it leaves to the front of waiting, behind the one it made room for; that one starts in the next step, not in
    this one, in which the others decode."""
    core = make_core()
    add(core, "low", 7, priority=9)
    add(core, "mid", 7, priority=5)
    one_step(core)
    add(core, "high", 15, priority=1)
    plan, _ = one_step(core)
    assert (plan.preempted, chunks(plan), plan.num_prefill_groups) == ([("low", "recompute")], [("mid", 1)], 0)
    assert plan.free_gpu == 4, "blocks enough for it, beside those that decode"
    assert queues(core) == {"waiting": ["high", "low"], "running": ["mid"], "swapped": []}
    plan, _ = one_step(core)
    assert (chunks(plan), plan.num_prefill_groups) == ([("high", 15)], 1)
    assert queues(core) == {"waiting": ["low"], "running": ["mid", "high"], "swapped": []}


def test_priority_preemptions_are_not_in_the_count_for_lack_of_blocks() -> None:
    """R46, R80: but they are preemptions."""
    core = make_core()
    add(core, "low", 20, priority=9)
    one_step(core)
    add(core, "high", 15, priority=1)
    plan, _ = one_step(core)
    assert (plan.preempted, plan.num_preempted) == ([("low", "recompute")], 0)
    assert plan.num_cumulative_preemptions == 1


def test_preemption_by_priority_runs_when_no_prompt_starts() -> None:
    """R40, R42: S0's prose has it the other way round; while prompts start no request is preempted."""
    core = make_core()
    add(core, "low", 8, priority=9)
    one_step(core)
    add(core, "high", 3, priority=1)
    add(core, "higher", 21, priority=0)
    plan, _ = one_step(core)
    assert (plan.preempted, chunks(plan)) == ([], [("high", 3)])
    assert queues(core)["running"] == ["low", "high"]


def test_it_stops_as_soon_as_the_head_fits() -> None:
    """R83: S0's listing omits it; else every less important one would leave."""
    core = make_core(num_gpu_blocks=8)
    for name, priority in (("a", 7), ("b", 8), ("c", 9)):
        add(core, name, 8, priority=priority)
    one_step(core)
    add(core, "high", 13, priority=1)
    plan, _ = one_step(core)
    assert plan.preempted == [("c", "recompute")]
    assert chunks(plan) == [("a", 1), ("b", 1)]


def test_the_head_may_fit_by_sequences_too() -> None:
    """R82, R83: victims are off both budgets, so one slot is enough."""
    core = make_core(num_gpu_blocks=20, max_num_seqs=2)
    for name, priority in (("a", 7), ("b", 8)):
        add(core, name, 3, priority=priority)
    one_step(core)
    add(core, "high", 3, priority=1)
    plan, _ = one_step(core)
    assert (plan.preempted, chunks(plan)) == ([("b", "recompute")], [("a", 1)])
    assert chunks(one_step(core)[0]) == [("high", 3)]


def test_equally_important_ones_are_not_pushed_out() -> None:
    """R82: only those with a larger key leave, and an earlier arrival is smaller."""
    core = make_core(num_gpu_blocks=8)
    add(core, "first", 20, priority=5, arrival=1.0)
    one_step(core)
    add(core, "second", 15, priority=5, arrival=2.0)
    assert one_step(core)[0].preempted == []
    core.abort(["second"])
    add(core, "twin", 15, priority=5, arrival=1.0)
    assert one_step(core)[0].preempted == []
    core.abort(["twin"])
    add(core, "earlier", 15, priority=5, arrival=0.5)
    assert one_step(core)[0].preempted == [("first", "recompute")]


def test_the_head_is_the_one_of_the_queue_as_it_stands() -> None:
    """R82: waiting is sorted after the head was taken, so a more important one behind it makes no room yet."""
    core = make_core()
    add(core, "low", 20, priority=5)
    one_step(core)
    add(core, "lower", 15, priority=9)
    add(core, "high", 15, priority=1)
    assert one_step(core)[0].preempted == []
    assert queues(core)["waiting"] == ["high", "lower"]
    assert one_step(core)[0].preempted == [("low", "recompute")]


def test_a_victim_of_several_samples_goes_to_the_host() -> None:
    """R84, R205: with its pairs in the plan and in the swapped queue; the reference loses both."""
    core = make_core(num_gpu_blocks=8)
    add(core, "low", 7, 6, priority=9, n=2)
    steps(core, 2)
    add(core, "high", 27, 2, priority=1)
    plan, _ = one_step(core)
    assert plan.preempted == [("low", "swap")]
    assert plan.swapped_out == {"low": len(plan.swap_out)}
    assert len(plan.swap_out) > 0
    assert {s.status for s in core.request("low").sequences} == {SequenceStatus.SWAPPED}
    assert queues(core) == {"waiting": ["high"], "running": [], "swapped": ["low"]}
    assert chunks(one_step(core)[0]) == [("high", 27)], "before its victim is back"
    tokens = finish(core)
    assert {name: len(found) for name, found in tokens.items()} == {"low/0": 4, "low/1": 4, "high/0": 1}
