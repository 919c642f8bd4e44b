"""Chitu's skew scheduler: slots with residents (R183-R187)."""

import pytest

from scheduler_svc.core.policies.chitu.scored import TOO_LARGE
from tests.support.core.task_builders import Tasks, ids


def skew(**knobs: object) -> Tasks:
    """Two slots for four tasks, unless told otherwise."""
    return Tasks(
        "chitu-skew", **{"pp_size": 2, "max_reqs": 4, "scheduler_type": "prefill_first,request_preset", **knobs}
    )


def test_a_slot_holds_its_tasks_for_life() -> None:
    """R183: residents stay where they came, and a step runs one slot."""
    tasks = skew()
    for name in "abc":
        tasks.add(name, max_tokens=4)
    assert ids(tasks.step()) == ["a", "b"]
    assert ids(tasks.step()) == ["c"]
    assert tasks["slots"] == [["a", "b"], ["c"]]
    assert [ids(tasks.step()) for _ in range(4)] == [["a", "b"], ["c"]] * 2


@pytest.mark.parametrize(
    ("max_reqs", "pp_size", "sizes"), [(8, 3, [3, 3, 2]), (2, 4, [1, 1]), (5, 1, [5]), (7, 4, [2, 2, 2, 1])]
)
def test_slots_share_the_tasks_evenly(max_reqs: int, pp_size: int, sizes: list[int]) -> None:
    """R179: as many slots as stages, at most one for each task; the first ones take the remainder."""
    tasks = skew(max_reqs=max_reqs, pp_size=pp_size)
    assert tasks.core.depth == len(sizes)
    for i in range(max_reqs + 3):
        tasks.add(f"t{i}", max_tokens=20)
    assert [len(tasks.step()) for _ in sizes] == sizes


def test_newcomers_fill_a_slot_in_score_order() -> None:
    """R184: as many as there are places, the best first; with no free slot, or no task ready, nothing happens."""
    tasks = skew(scheduler_type="request_preset")
    assert tasks.plan() == [] and tasks["free_lanes"] == [0, 1]
    for name, priority in (("a", 1), ("b", 3), ("c", 2)):
        tasks.add(name, priority=priority)
    assert ids(tasks.plan()) == ["b", "c"] and ids(tasks.plan()) == ["a"]
    assert tasks.core.schedule(tasks.now) == []


def test_a_decoding_slot_takes_no_prompt() -> None:
    """R184: newcomers are of the last resident's type; the slot takes prompts again when it is empty."""
    tasks = skew(pp_size=1, max_reqs=2)
    tasks.add("a", max_tokens=3)
    tasks.step()
    tasks.add("b")
    assert [ids(tasks.step()) for _ in range(3)] == [["a"], ["a"], ["b"]]


def test_an_empty_slot_takes_the_type_of_the_best() -> None:
    """R184: a decode that came prefilled, by its priority, and no prompt with it."""
    tasks = skew(scheduler_type="request_preset")
    tasks.add("new", priority=1)
    tasks.core.add_prefilled(tasks.request("done", 4, priority=2, committed=(5,)))
    assert tasks.step() == [("done", "D", 4, 1)]
    assert tasks.step() == [("new", "P", 0, 4)]


def test_strict_modes_are_for_newcomers() -> None:
    """R184: under prefill_only a resident goes on to decode beside a newcomer."""
    tasks = skew(pp_size=1, scheduler_type="prefill_only", defects="recorded")
    tasks.add("a", max_tokens=4)
    tasks.step()
    assert tasks.plan() == [] and tasks["free_lanes"] == [0]
    tasks.add("b")
    assert tasks.step() == [("a", "D", 4, 1)]


def test_chunks_go_to_the_prefills_behind_the_decodes() -> None:
    """R185: while a prefill stands last the decodes wait; the chunk is shared in slot order."""
    tasks = skew(pp_size=1, prefill_chunk_size=6)
    tasks.add("a", 4, priority=2)
    tasks.add("b", 6, priority=1)
    assert [tasks.step() for _ in range(3)] == [
        [("a", "P", 0, 4), ("b", "P", 0, 2)],
        [("b", "P", 2, 4)],
        [("a", "D", 4, 1), ("b", "D", 6, 1)],
    ]


def test_the_last_resident_takes_the_place_of_one_that_ended() -> None:
    """R186: swapped in and popped, several one after the other in their order; the remaining ones decode in the new order."""
    tasks = skew(pp_size=1, max_reqs=5, scheduler_type="fcfs")
    for name in "abcde":
        tasks.add(name, max_tokens=9)
    tasks.step()
    tasks.step(eos=("b",))
    assert tasks["slots"] == [["a", "e", "c", "d"]]
    tasks.step(eos=("a", "c"))
    assert tasks["slots"] == [["d", "e"]]
    assert ids(tasks.step()) == ["d", "e"]


def test_a_slot_with_nothing_to_run_loses_its_step() -> None:
    """R187: it goes to the tail with the next plan, though another slot had work."""
    tasks = skew()
    tasks.add("a", max_tokens=9)
    assert ids(tasks.step()) == ["a"]
    assert tasks.plan() == [] and tasks["used_lanes"] == {1: None}
    assert ids(tasks.step()) == ["a"] and tasks["free_lanes"] == [1]


def test_a_task_moves_in_when_its_whole_life_fits() -> None:
    """R184: no task is ever evicted; b waits until a is over, though its prompt would fit."""
    tasks = skew(pp_size=1, num_blocks=5)
    tasks.add("a", 4, max_tokens=9)
    tasks.add("b", 4, max_tokens=9)
    assert tasks["slots"] == [[]] and ids(tasks.step()) == ["a"]
    steps = tasks.run()
    assert all(len(step) <= 1 for step in steps)
    first_b = next(i for i, step in enumerate(steps) if "b" in ids(step))
    assert not any("a" in ids(step) for step in steps[first_b:])


def test_one_larger_than_the_pool_runs_alone_and_ends() -> None:
    """R182: what it may take is the whole pool; when that is used up it ends, and the next is served."""
    tasks = skew(pp_size=1, num_blocks=3)
    tasks.add("a", 4, max_tokens=50, priority=2)
    tasks.add("b", 4, max_tokens=3, priority=1)
    ran, ended = [], []
    while tasks.core.has_unfinished:
        ran += ids(tasks.step())
        ended += tasks.plans[0].ended
    assert ran == ["a"] * 9 + ["b"] * 3
    assert [(end.request_id, end.error) for end in ended] == [("a", TOO_LARGE)]
