"""Where the reference is not followed: Chitu's recorded defects, and what happens as served. All work ends."""

from pathlib import Path

import pytest

from scheduler_svc.core.errors import TaskDoesNotFit
from scheduler_svc.core.plan import StepPlan, StepResult
from scheduler_svc.core.request import SequenceStatus
from scheduler_svc.core.request_rules import BeamRules
from svc_common.errors import OutOfRange
from tests.golden import family_chitu
from tests.golden.compare import first_difference
from tests.golden.scenario import read
from tests.support.core.task_builders import Tasks, ids

RECORDINGS = sorted((Path(__file__).parents[3] / "golden" / "chitu").glob("*.json"))
ENDS_OTHERWISE = {"err_decode_00", "err_prefill_00", "decode_only_mixed_00"}


@pytest.mark.parametrize("path", [path for path in RECORDINGS if path.stem not in ENDS_OTHERWISE], ids=lambda p: p.stem)
def test_repairs_change_no_recording(path: Path) -> None:
    """R165-R195: as served the decisions are the recorded ones, wherever the recording comes to its end."""
    scenario = read(path)
    assert first_difference(scenario.trace or [], family_chitu.run(scenario, defects="repaired")) is None


def test_the_recorded_defects_are_still_there() -> None:
    """R171, R173: the list above is right."""
    for path in RECORDINGS:
        if path.stem in ENDS_OTHERWISE:
            scenario = read(path)
            try:
                trace = family_chitu.run(scenario, defects="repaired")
            except OutOfRange:
                continue
            assert first_difference(scenario.trace or [], trace) is not None


def test_a_lone_decode_waits_for_blocks_in_flight() -> None:
    """R173: it would fit alone; what another group runs gives them back, or comes to compete."""
    tasks, _ = two_groups(defects="recorded")
    with pytest.raises(TaskDoesNotFit):
        tasks.plan()
    tasks, in_flight = two_groups()
    assert tasks.plan() == []
    tasks.finish(in_flight)
    steps = tasks.run()
    assert {name for step in steps for name in ids(step)} == {"a", "b"}


def two_groups(**knobs: str) -> tuple[Tasks, StepPlan]:
    """All five blocks are held, by a, whose decode is in flight, and by b, which is the only one ready and needs one more."""
    tasks = Tasks(num_blocks=5, pp_size=2, max_reqs=2, scheduler_type="request_preset", **knobs)
    tasks.add("a", 8, max_tokens=5, priority=2)
    tasks.step()
    tasks.add("b", 8, max_tokens=5, priority=1)
    tasks.plan()
    [decode_of_a] = tasks.plans
    assert tasks.plan() == [("b", "P", 0, 8)]
    tasks.finish()
    return tasks, decode_of_a


def test_a_lone_decode_rolls_back_half_a_prompt() -> None:
    """R173: nothing is in flight; the half-computed prompt holds what it needs, and starts anew later."""
    for defects in ("recorded", "repaired"):
        tasks = Tasks(num_blocks=4, prefill_chunk_size=8, scheduler_type="request_preset", defects=defects)
        tasks.add("half", 16, max_tokens=1, priority=1)
        tasks.step()
        tasks.add("a", 8, max_tokens=4, priority=2)
        tasks.step()
        if defects == "recorded":
            with pytest.raises(TaskDoesNotFit):
                tasks.plan()
            continue
        assert tasks.step() == [("a", "D", 8, 1)]
        assert [name for name, _ in tasks["evicted"]] == ["half"]
        assert [ids(step) for step in tasks.run()] == [["a"], ["a"], ["half"], ["half"]]


def test_half_computed_prompts_do_not_hold_each_other_up() -> None:
    """R170: no decode is left that could give blocks back; the last one rolls back, and both end."""
    for defects in ("recorded", "repaired"):
        tasks = Tasks(num_blocks=6, prefill_chunk_size=8, scheduler_type="request_preset", defects=defects)
        tasks.add("b", 16, max_tokens=1, priority=1)
        tasks.step()
        tasks.add("c", 20, max_tokens=1, priority=2)
        tasks.step()
        tasks.step()
        if defects == "recorded":
            assert [tasks.step() for _ in range(9)] == [[]] * 9
            continue
        assert {name for step in tasks.run() for name in ids(step)} == {"b", "c"}


def test_a_low_threshold_does_not_outlive_those_it_spares() -> None:
    """R175: the decode it was lowered for is aborted, so no task finishes; the evicted ones start all the same."""
    for defects in ("recorded", "repaired"):
        tasks = Tasks(num_blocks=4, scheduler_type="prefill_first,request_preset", defects=defects)
        tasks.add("a", 7, max_tokens=9, priority=2)
        tasks.add("b", 7, max_tokens=9, priority=1)
        while not tasks["evicted"]:
            tasks.step()
        tasks.core.abort(["a"])
        assert tasks["threshold"] == 2
        assert ids(tasks.step()) == (["b"] if defects == "repaired" else [])


def test_a_prompt_larger_than_the_cache_is_refused() -> None:
    """R163, R171: when it comes, with chunks or without."""
    for chunk in (None, 4):
        with pytest.raises(OutOfRange, match="more than the 16"):
            Tasks(num_blocks=4, prefill_chunk_size=chunk).add("a", 17)


def test_every_rank_has_a_chunk() -> None:
    """R191: of a chunk smaller than the number of ranks; the reference gives rank 1 nothing for ever."""
    for defects in ("recorded", "repaired"):
        tasks = Tasks("chitu-dp", dp_size=2, max_reqs=2, prefill_chunk_size=1, defects=defects)
        tasks.add("a", 3, max_tokens=2)
        tasks.add("b", 3, max_tokens=2)
        if defects == "recorded":
            assert "b" not in {name for _ in range(30) for name in ids(tasks.step())}
        else:
            assert ids(tasks.step()) == ["a", "b"]


def test_newcomers_do_not_push_out_a_prompt_in_flight() -> None:
    """R189: those with an owner keep their places among the candidates, however early others began."""
    for defects in ("recorded", "repaired"):
        tasks = Tasks("chitu-dp", dp_size=2, max_reqs=2, prefill_chunk_size=4, defects=defects)
        tasks.add("late", 9, max_tokens=2, arrival=50.0)
        tasks.add("other", 2, max_tokens=9, arrival=49.0)
        tasks.step()
        for i in range(4):
            tasks.add(f"early{i}", arrival=float(i))
        assert ("late" in ids(tasks.step())) is (defects == "repaired")


def test_an_evicted_task_returns_under_decode_only() -> None:
    """R167: the reference leaves it standing in the pool."""
    for defects in ("recorded", "repaired"):
        tasks = Tasks(num_blocks=4, scheduler_type="decode_only", defects=defects)
        for name in "ab":
            tasks.core.add_prefilled(tasks.request(name, 7, 9, committed=(5,)))
        for _ in range(40):
            tasks.step()
        assert tasks.pool() == (["b"] if defects == "recorded" else [])


def test_what_a_strict_mode_leaves_to_others_ends() -> None:
    """R167: prompts under decode_only, decodes under prefill_only, which no step takes over."""
    for mode in ("decode_only", "prefill_only"):
        tasks = Tasks(scheduler_type=mode)
        tasks.add("a")
        ended = []
        for _ in range(20):
            tasks.step()
            ended += tasks.plans[0].ended
        [end] = ended
        assert end.status is SequenceStatus.FINISHED_IGNORED and "another scheduler" in str(end.error)


def test_chunks_smaller_than_a_group_do_not_stop_it() -> None:
    """R28, R162: three beams lose their blocks, and sample together again although a chunk is one token."""
    tasks = Tasks(prefill_chunk_size=1, num_blocks=30)
    tasks.core.add(tasks.request("a", 2, 4, n=3, beam=BeamRules()))
    ended = []
    for num in range(40):
        tasks.plan()
        [plan] = tasks.plans
        names = [entry.name for entry in plan.scheduled if entry.samples]
        guesses = {name: [(10 * i + k + 1, -0.1 * (k + i)) for k in range(6)] for i, name in enumerate(names)}
        ended += [*plan.ended, *tasks.core.update(StepResult(plan.step, candidates=guesses)).ended]
        if num == 3:
            assert len(tasks.group("a").live) == 3
            tasks.core.reset_sequences_of_lost_worker()
    assert {end.status for end in ended} == {SequenceStatus.FINISHED_LENGTH_CAPPED} and not tasks.core.has_unfinished


@pytest.mark.parametrize("preset", ["chitu", "chitu-skew", "chitu-dp"])
def test_a_lost_worker_delays_no_other_task(preset: str) -> None:
    """R178: what was in flight is not any more: all lanes are free, and their tasks start anew."""
    tasks = Tasks(preset, pp_size=2, max_reqs=2, prefill_chunk_size=3)
    for name in "ab":
        tasks.add(name, 8)
    in_flight = [*tasks.plan(), *tasks.plan()]
    assert sorted(ids(in_flight)) == ["a", "b"]
    tasks.core.reset_sequences_of_lost_worker()
    again = [*tasks.plan(), *tasks.plan()]
    assert sorted(ids(again)) == ["a", "b"] and all(start == 0 for _, _, start, _ in again)
