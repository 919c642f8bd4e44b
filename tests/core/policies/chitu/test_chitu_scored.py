"""Chitu's base scheduler: whose turn it is, what a batch takes, scheduler groups (R165-R170, R172, R176-R181)."""

import pytest

from scheduler_svc.core.composition import presets
from scheduler_svc.core.limits import CoreLimits
from scheduler_svc.core.policies.chitu.scorers import TaskOrder
from svc_common.errors import ConfigError
from tests.support.core.builders import make_request
from tests.support.core.pipelines import Loop
from tests.support.core.task_builders import Tasks, ids


def test_nothing_to_do_takes_no_group() -> None:
    """R165: an empty pool, or no free group."""
    tasks = Tasks()
    assert tasks.plan() == [] and tasks["free_lanes"] == [0]
    tasks.add("a")
    tasks.add("b")
    tasks.plan()
    assert tasks.core.schedule(tasks.now) == []


def test_only_ready_tasks_are_looked_at() -> None:
    """R166: tasks in flight are not, whatever their score."""
    tasks = Tasks(pp_size=2, max_reqs=2, scheduler_type="request_preset")
    tasks.add("a", priority=9)
    assert ids(tasks.plan()) == ["a"]
    tasks.add("b", priority=1)
    assert ids(tasks.plan()) == ["b"]


@pytest.mark.parametrize(
    ("text", "first", "second"),
    [
        ("prefill_only", ["new"], []),
        ("decode_only", ["old"], ["old"]),
        (" Prefill_Only , decode_only", ["new"], ["new", "old"]),
        ("", ["old"], ["old"]),
    ],
)
def test_strict_modes(text: str, first: list[str], second: list[str]) -> None:
    """R167: exactly one of the words leaves the other type alone, and comes before all else; both together do not.

    As scorers they are prefill_first and fcfs, which is also what nothing is; case and blanks are free.
    """
    tasks = Tasks(scheduler_type=text, defects="recorded")
    tasks.core.add_prefilled(tasks.request("old", 4, arrival=1.0, committed=(5,)))
    tasks.add("new", arrival=2.0)
    assert sorted(ids(tasks.step())) == first
    assert sorted(ids(tasks.step())) == second


def test_the_fallback_finds_nothing_behind_a_strict_mode() -> None:
    """R167, R172: decodes hold the blocks, and prefill_only does not run them."""
    tasks = Tasks(scheduler_type="prefill_only", num_blocks=4, defects="recorded")
    tasks.add("a", 12)
    tasks.step()
    tasks.add("b", 8)
    assert tasks.plan() == [] and tasks["fallback"]


SCORERS = [
    ("fcfs", ["b", "c", "a"]),
    ("fifo", ["b", "c", "a"]),
    ("request_preset", ["c", "a", "b"]),
    ("stride", ["c", "b", "a"]),
    ("deadline", ["a", "b", "c"]),
    ("prefix_align", ["a", "c", "b"]),
    ("prefill_first", ["a", "b", "c"]),
    ("prefill_first,fcfs", ["b", "c", "a"]),
    ("request_preset, fcfs", ["c", "b", "a"]),
]


@pytest.mark.parametrize(("text", "expected"), SCORERS)
def test_scorers(text: str, expected: list[str]) -> None:
    """R168: tuples of scores, the larger first, ties in pool order."""
    tasks = Tasks(scheduler_type=text, max_reqs=1)
    tasks.add("a", 2, max_tokens=1, arrival=90.0, priority=1)
    tasks.add("b", 9, max_tokens=1, arrival=89.995, priority=1)
    tasks.add("c", 5, max_tokens=1, arrival=89.999, priority=2)
    assert [ids(tasks.step()) for _ in range(3)] == [[name] for name in expected]


def test_the_deadline_weighs_length_against_arrival() -> None:
    """R161, R168: six tokens less are worth five milliseconds of waiting."""
    tasks = Tasks(scheduler_type="deadline", max_reqs=1)
    tasks.add("long", 9, arrival=1.0)
    tasks.add("short", 3, arrival=1.005)
    assert ids(tasks.step()) == ["short"]


def test_stride_grows_with_age_and_is_never_set_back() -> None:
    """R168: priority times age: the older one passes the more important one, and being served changes nothing."""
    order = TaskOrder.of("stride")
    tasks = Tasks(scheduler_type="stride")
    tasks.add("old", arrival=0.0, priority=2)
    tasks.add("new", arrival=9.0, priority=10)
    groups = [tasks.group("old"), tasks.group("new")]
    assert [g.request.request_id for g in order.ranked(groups, 10.0)] == ["old", "new"]
    tasks.step()
    assert [g.request.request_id for g in order.ranked(groups, 10.0)] == ["old", "new"]
    assert [g.request.request_id for g in order.ranked(groups, 20.0)] == ["new", "old"]


def test_nanoseconds_decide() -> None:
    """R168: arrivals one nanosecond apart, a month after the clock began, are in their order."""
    tasks = Tasks(scheduler_type="fcfs", max_reqs=1)
    month = 2_592_000.0
    tasks.add("later", arrival=month + 2e-9)
    tasks.add("sooner", arrival=month + 1e-9)
    assert ids(tasks.step()) == ["sooner"]


def test_an_unknown_scorer_is_refused_when_it_is_built() -> None:
    """R168: the field is named, and what there is."""
    with pytest.raises(ConfigError, match=r"scheduler_type.*'lifo'.*prefix_align") as error:
        presets.build("chitu", CoreLimits(4, 9, max_model_len=16), scheduler_type="fcfs, lifo")
    assert error.value.metadata["field"] == "scheduler_type"


def test_warming_up_is_prefill_first_alone() -> None:
    """R168: whatever the type says, until it is over."""
    tasks = Tasks(scheduler_type="request_preset", max_reqs=1)
    tasks.add("old", priority=9)
    tasks.step()
    tasks.add("a", priority=1)
    tasks.add("b", priority=2)
    tasks.core.warm_up(on=True)
    assert tasks.step() == [("a", "P", 0, 4)]
    tasks.core.warm_up(on=False)
    assert tasks.step() == [("old", "D", 4, 1)]


def test_batches_are_of_one_type() -> None:
    """R169: that of the best task."""
    tasks = Tasks(scheduler_type="fcfs")
    tasks.add("a", arrival=1.0)
    tasks.step()
    tasks.add("b", arrival=2.0)
    tasks.add("c", arrival=0.5)
    assert tasks.step() == [("c", "P", 0, 4), ("b", "P", 0, 4)]
    tasks.add("d", arrival=9.0)
    assert tasks.step() == [("c", "D", 4, 1), ("a", "D", 4, 1), ("b", "D", 4, 1)]


def test_the_chunk_is_shared_in_score_order() -> None:
    """R170: min(remaining, left) each; tasks behind get nothing."""
    tasks = Tasks(scheduler_type="prefill_first,request_preset", prefill_chunk_size=10)
    for name, priority in (("a", 1), ("b", 3), ("c", 2)):
        tasks.add(name, 6, priority=priority)
    assert tasks.step() == [("b", "P", 0, 6), ("c", "P", 0, 4)]
    assert tasks.step() == [("c", "P", 4, 2), ("a", "P", 0, 6)]


def test_the_capacity_walk_skips_no_task() -> None:
    """R170: it stops at the first that does not fit, though the next one would; only then it cuts."""
    tasks = Tasks(num_blocks=6, max_prefill_tasks=2)
    tasks.add("a", 8)
    tasks.add("b", 20)
    tasks.add("c", 4)
    assert ids(tasks.step()) == ["a"]
    tasks = Tasks(num_blocks=6, max_prefill_tasks=2)
    for name in "abc":
        tasks.add(name, 4)
    assert ids(tasks.step()) == ["a", "b"]


def test_blocks_it_has_already_are_not_counted_again() -> None:
    """R170: a second chunk needs what it lacks to reach its end."""
    tasks = Tasks(num_blocks=3, prefill_chunk_size=6)
    tasks.add("a", 12, max_tokens=1)
    assert [tasks.step() for _ in range(2)] == [[("a", "P", 0, 6)], [("a", "P", 6, 6)]]


def test_decode_in_the_same_call_where_no_prompt_fits() -> None:
    """R172: the prompt comes first and cannot start; the decodes go on in this step."""
    tasks = Tasks(num_blocks=4)
    tasks.add("a", 8)
    tasks.step()
    tasks.add("b", 12)
    assert tasks.step() == [("a", "D", 8, 1)] and tasks["fallback"]


def test_groups_are_taken_and_given_back_in_order() -> None:
    """R176, R178, R179: the one that was free for longest; several at once come back smaller ids first, to the tail."""
    tasks = Tasks(pp_size=3, max_reqs=3)
    plans = []
    for name in "abc":
        tasks.add(name, max_tokens=20)
        tasks.plan()
        plans += tasks.plans
        assert tasks.group(name).lane == tasks.plans[0].lane
    assert [plan.lane for plan in plans] == [0, 1, 2] and tasks.core.depth == 3
    tasks.finish(plans[2])
    tasks.finish(plans[0])
    assert (tasks["lanes_back"], tasks["free_lanes"]) == ([0, 2], [])
    tasks.plan()
    plans += tasks.plans
    assert (tasks.plans[0].lane, tasks["free_lanes"]) == (0, [2])
    tasks.finish(plans[1])
    tasks.plan()
    plans += tasks.plans
    assert (tasks.plans[0].lane, tasks["free_lanes"]) == (2, [1])
    tasks.add("d")
    tasks.add("e")
    tasks.plan()
    plans += tasks.plans
    for plan in plans[3:]:
        tasks.finish(plan)
    assert (tasks["used_lanes"], tasks["lanes_back"]) == ({0: None, 1: None, 2: None}, [0, 1, 2])
    tasks.plan()
    assert tasks["free_lanes"] == [1, 2]


def test_a_task_keeps_its_group_until_it_is_scheduled_again() -> None:
    """R178: also when its result is there; an evicted task has none (R174)."""
    tasks = Tasks(pp_size=2, max_reqs=2)
    tasks.add("a", max_tokens=9)
    tasks.step()
    tasks.add("b", max_tokens=9)
    assert tasks.group("a").lane == 0 and tasks.group("b").lane is None


def test_an_empty_batch_takes_its_group_all_the_same() -> None:
    """R177: it came out empty though a task was ready; the group is back for the next plan, behind the others."""
    tasks = Tasks(scheduler_type="prefill_only", pp_size=2, num_blocks=4, defects="recorded")
    tasks.add("a", 12)
    tasks.step()
    tasks.add("b", 8)
    assert tasks.plan() == []
    assert (tasks["free_lanes"], tasks["used_lanes"]) == ([0], {1: None})
    tasks.plan()
    assert (tasks["free_lanes"], tasks["used_lanes"]) == ([1], {0: None})


@pytest.mark.parametrize(
    ("knobs", "num_prefills", "num_decodes"),
    [
        ({"max_reqs": 5}, 5, 5),
        ({"max_reqs": 5, "pp_size": 2}, 3, 3),
        ({"max_reqs": 5, "pp_size": 2, "prefill_num_tasks_divided_by_pp": False, "prefill_num_tasks": 4}, 4, 3),
        ({"max_reqs": 5, "pp_size": 2, "enforce_decode_num_tasks_max": False, "decode_num_tasks": 1}, 3, 1),
        ({"max_reqs": 5, "prefill_num_tasks_divided_by_pp": False, "prefill_num_tasks": 4}, 5, 5),
        ({"max_reqs": 5, "max_prefill_tasks": 2, "max_decode_tasks": 4}, 2, 4),
    ],
)
def test_batch_limits(knobs: dict[str, int], num_prefills: int, num_decodes: int) -> None:
    """R180: max_reqs, or a share of it or fixed numbers by two flags; the pool itself is not limited."""
    tasks = Tasks(**knobs)
    for i in range(7):
        tasks.add(f"t{i}", max_tokens=20)
    steps = tasks.run()
    assert max(len(step) for step in steps if step[0][1] == "P") == num_prefills
    assert max(len(step) for step in steps if step[0][1] == "D") == num_decodes


@pytest.mark.parametrize("preset", ["chitu", "chitu-skew", "chitu-dp"])
def test_tasks_never_run_out_of_memory(preset: str) -> None:
    """R181: prompts are admitted by what they take, decodes leave when blocks run out: every plan's blocks are there."""
    tasks = Tasks(preset, num_blocks=9, scheduler_type="prefill_first,request_preset", max_num_seqs=6)
    for i in range(9):
        tasks.add(f"t{i}", 3 + 2 * i % 9, max_tokens=3 + i, priority=i % 3)
    while tasks.core.has_unfinished:
        tasks.step()
        assert tasks.core.check_integrity() == []
    report = tasks.core.pool_report()
    assert report.gpu.free == report.gpu.total


@pytest.mark.parametrize("preset", ["chitu", "chitu-skew"])
def test_the_batch_queue_drives_several_groups(preset: str) -> None:
    """R179, R147: as many plans in flight as groups, empty ones too; every request gets the tokens it gets alone."""
    results = []
    for pp_size in (1, 3):
        limits = CoreLimits(4, 17, max_model_len=64, max_num_seqs=8, max_num_batched_tokens=64, prefix_caching=False)
        core = presets.build(preset, limits, scheduler_type="fcfs", pp_size=pp_size, prefill_chunk_size=5)
        loop = Loop(core)
        for i in range(6):
            core.add(make_request(f"r{i}", 3 + 2 * i, 5 + i % 3, arrival=float(i)))
        results.append(loop.run())
        assert core.depth == pp_size and core.pool_report().gpu.free == 16
    assert results[0] == results[1] and len(results[0]) == 6
