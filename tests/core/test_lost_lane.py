"""One of several workers is lost: what was its starts anew elsewhere, the others' work is not touched (R178, R188, R190)."""

import random

import pytest

from scheduler_svc.core.composition import presets
from scheduler_svc.core.limits import CoreLimits
from scheduler_svc.core.plan import StepOutcome, StepPlan, StepResult
from scheduler_svc.core.request import Request
from scheduler_svc.core.request_rules import StopRules
from tests.support.core.task_builders import Tasks, ids


def lanes_of(tasks: Tasks) -> dict[str, int]:
    """Tasks by the rank where they are scheduled, in the plans made last."""
    return {entry.request_id: plan.lane for plan in tasks.plans for entry in plan.scheduled}


def test_its_tasks_go_to_the_others_and_its_plans_are_forgotten() -> None:
    """R190: an owner for life, until it loses its memory; tasks of the other rank stay and are not computed again."""
    tasks = Tasks("chitu-dp", dp_size=2, max_reqs=8)
    for name in "abcd":
        tasks.add(name, 6)
    tasks.plan()
    before = lanes_of(tasks)
    assert before == {"a": 0, "b": 1, "c": 0, "d": 1}
    of_0, of_1 = tasks.plans
    tasks.core.reset_sequences_of_lost_worker(1)
    tasks.finish(of_0)
    assert not tasks.core.update(StepResult(of_1.step, {"b/0": [5]})).runs, "a late result of it is dropped"
    again = tasks.plan()
    assert again == [("b", "P", 0, 6), ("d", "P", 0, 6)] and set(lanes_of(tasks).values()) == {0}
    assert [plan.left for plan in tasks.plans] == [[], []], "it has nothing to forget"
    for plan in tasks.plans:
        tasks.finish(plan)
    assert sorted(ids(tasks.plan())) == ["a", "b", "c", "d"] and set(lanes_of(tasks).values()) == {0}
    assert not tasks.core.check_integrity()


def test_a_rank_without_a_worker_gets_no_task_until_it_is_back() -> None:
    """R190: new tasks go to the ranks that have a worker; one that finds no place there waits."""
    tasks = Tasks("chitu-dp", dp_size=2, max_reqs=4)
    tasks.core.reset_sequences_of_lost_worker(0)
    for name in "abc":
        tasks.add(name, 6)
    tasks.plan()
    assert lanes_of(tasks) == {"a": 1, "b": 1}, "two tasks a rank"
    tasks.core.take_worker_back(0)
    tasks.plan()
    assert lanes_of(tasks) == {"c": 0}


def test_its_prefixes_are_forgotten_and_the_others_kept() -> None:
    """R190: what a rank's blocks hold is known of that rank alone."""
    tasks = Tasks("chitu-dp", dp_size=2, max_reqs=8, prefix_caching=True, dp_prefix_affinity=None)
    for name in "ab":
        tasks.add(name, 12, 1)
        tasks.step()
    tasks.core.reset_sequences_of_lost_worker(1)
    tasks.core.take_worker_back(1)
    for name in "cd":
        tasks.add(name, 12, 1)
    tasks.plan()
    found = {name: num for plan in tasks.plans for name, num in plan.lookups}
    assert lanes_of(tasks) == {"c": 0, "d": 1} and found == {"c": 8, "d": 0}


def test_one_worker_is_lost_as_a_whole() -> None:
    """Lanes of one worker have no loss of their own: that is a bug of the caller."""
    with pytest.raises(AssertionError, match="together"):
        Tasks("chitu", pp_size=2).core.reset_sequences_of_lost_worker(1)


@pytest.mark.parametrize("seed", range(20))
def test_whichever_rank_is_lost_all_tasks_get_all_tokens(seed: int) -> None:
    """R17, R27, R190: random losses and returns of three ranks, results in any order: each token once, and no block leaks."""
    rng = random.Random(seed)
    limits = CoreLimits(
        block_size=4,
        num_gpu_blocks=20,
        max_model_len=64,
        max_num_seqs=9,
        max_num_batched_tokens=64,
        prefix_caching=bool(seed % 2),
    )
    core = presets.build("chitu-dp", limits, dp_size=3, prefill_chunk_size=rng.choice([None, 12]))
    lengths = {f"r{i}": rng.randint(1, 12) for i in range(20)}
    expected: dict[str, int] = {}
    for name, length in lengths.items():
        prompt, n = [7] * rng.randint(1, 20), rng.choice([1, 1, 2])
        core.add(Request(name, prompt, StopRules(length, ignore_eos=True), rng.random(), n=n))
        expected |= {f"{name}/{index}": length for index in range(n)}
    num_tokens: dict[str, int] = {}
    out: list[StepPlan] = []
    lost: list[int] = []
    for now in range(1_000):
        if not core.has_unfinished:
            break
        out += [plan for plan in core.schedule(float(now)) if not plan.is_empty]
        assert not [plan for plan in out if plan.lane in lost], "a plan for a rank without a worker"
        for plan in rng.sample(out, k=rng.randint(0, len(out))):
            out.remove(plan)
            count(core.update(StepResult(plan.step, sampled(plan))), num_tokens)
        if rng.random() < 0.1 and len(lost) < 2:
            lane = rng.choice([lane for lane in range(3) if lane not in lost])
            lost.append(lane)
            out = [plan for plan in out if plan.lane != lane]
            core.reset_sequences_of_lost_worker(lane)
        elif lost and rng.random() < 0.3:
            core.take_worker_back(lost.pop())
        assert not core.check_integrity()
    assert not core.has_unfinished
    assert num_tokens == expected
    assert core.pool_report().gpu.free == core.pool_report().gpu.total


def sampled(plan: StepPlan) -> dict[str, list[int]]:
    return {entry.name: [5] for entry in plan.scheduled if entry.samples}


def count(outcome: StepOutcome, num_tokens: dict[str, int]) -> None:
    for run in outcome.runs:
        assert run.offset == num_tokens.get(run.name, 0), "each token once"
        num_tokens[run.name] = run.offset + len(run.token_ids)
