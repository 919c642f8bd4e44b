"""Corner cases across phases under v0, and groups that are computed again with several live sequences."""

import pytest

from scheduler_svc.core.plan import StepPlan
from scheduler_svc.core.request import SequenceStatus
from scheduler_svc.core.scheduler import Scheduler
from tests.support.core.v0_builders import add, answer, chunks, finish, make_v0, names, one_step, queues, steps, until

PRESETS = pytest.mark.parametrize("preset", ["vllm-v0", "vllm-2023", "vllm-v0-chunked"])


@PRESETS
def test_alone_and_too_long_for_the_cache_it_ends(preset: str) -> None:
    """R197: it leaves for itself, comes back, and once prompt and outputs exceed all blocks it is ignored; others are served."""
    core = make_v0(preset, num_gpu_blocks=3)
    add(core, "big", 9, 20)
    add(core, "small", 3, 2)
    ended = []
    for _ in range(60):
        plan, outcome = one_step(core)
        ended += [(e.request_id, e.status) for e in [*plan.ended, *outcome.ended]]
    assert sorted(ended) == [
        ("big", SequenceStatus.FINISHED_IGNORED),
        ("small", SequenceStatus.FINISHED_LENGTH_CAPPED),
    ]
    assert core.state.shared.num_cumulative_preemptions > 0


@PRESETS
def test_an_abort_while_a_step_is_in_flight(preset: str) -> None:
    """R198: its blocks are free at once, and what the step gives for it is ignored."""
    core = make_v0(preset)
    add(core, "a", 3, n=2)
    add(core, "b", 3)
    one_step(core)
    [plan] = core.schedule(0)
    result = answer(core, plan)
    assert len(core.abort(["a"])) == 2
    assert [r.request_id for r in core.update(result).runs] == ["b"]
    assert list(core.block_tables()) == ["b/0"]
    assert core.check_integrity() == []


@PRESETS
def test_samples_of_different_lengths(preset: str) -> None:
    """R199: each ends by itself; the group's need shrinks to one, and the survivor is preempted by recompute with finished
    siblings in the group."""
    core = make_v0(preset, num_gpu_blocks=8)
    add(core, "a", 8, 12)
    add(core, "b", 7, 9, n=3)
    steps(core, 2)
    assert len(core.state.running[-1].live) == 3
    for name in ("b/0", "b/2"):
        core.stop_at(name, 1)
    assert core.state.running[-1].max_num_running_seqs == 1
    plan = until(core, "preempted")
    assert plan.preempted == [("b", "recompute")]
    plan = until(core, "num_prefill_groups")
    assert [name for name in names(plan) if name.startswith("b/")] == ["b/1"]
    assert core.request("b").sequences[1].num_output_tokens > 1
    finish(core)


@PRESETS
def test_blocks_add_up_in_every_step(preset: str) -> None:
    """R200: free and referenced ones are all there are, reference counts are those of the tables, in the end all are free."""
    core = make_v0(preset, num_gpu_blocks=12, prefix_caching=True)
    for i, name in enumerate("abcdef"):
        add(core, name, [1, 2, 3, 4, 5 + i, 6], 8, n=1 + i % 3)
    finish(core)


@PRESETS
def test_the_same_inputs_give_the_same_plans(preset: str) -> None:
    """R201: to the last block, and whatever the clock says."""

    def run(start: float) -> list[StepPlan]:
        core = make_v0(preset, num_gpu_blocks=10)
        for i, name in enumerate("abcd"):
            add(core, name, 5 + i, 9, n=1 + i % 2)
        return [one_step(core, start + i)[0] for i in range(40)]

    def shown(plans: list[StepPlan]) -> list[object]:
        return [(p.scheduled, p.swap_in, p.swap_out, p.copy, p.preempted, p.left, p.free_gpu) for p in plans]

    assert shown(run(0.0)) == shown(run(0.0)) == shown(run(1e9))


def test_swapped_groups_outrank_those_that_wait() -> None:
    """R202: so those of several sequences are preferred although no rule says so (R41)."""
    core = make_v0(num_gpu_blocks=9)
    add(core, "a", 11, 6)
    add(core, "b", 7, 6, n=3)
    until(core, "swap_out")
    for name in "cd":
        add(core, name, 3, 1)
    order = []
    while core.has_unfinished:
        plan, _ = one_step(core)
        order += [r for r in dict(chunks(plan)) if r not in order]
    assert order == ["a", "b", "c", "d"]


class TestRecomputeOfSamples:
    """A group of two that must be computed again."""

    @staticmethod
    def core() -> Scheduler:
        core = make_v0(num_gpu_blocks=6, preemption_mode="recompute")
        add(core, "a", 8, 6)
        add(core, "b", 6, 5, n=2)
        return core

    def test_it_waits_with_two_live_sequences(self) -> None:
        """R27, R77, R29: the one exception from the rule that a waiting group has one."""
        core = self.core()
        until(core, "preempted")
        group = next(iter(core.state.waiting))
        assert [s.name for s in group.live] == ["b/0", "b/1"]
        assert {(s.status, s.num_computed_tokens) for s in group.live} == {(SequenceStatus.PREEMPTED, 0)}
        assert queues(core) == {"waiting": ["b"], "running": ["a"], "swapped": []}

    def test_it_starts_again_with_the_prompts_full_blocks_shared(self) -> None:
        """R19, R100, R200: computed once, one table for all of it; each has a tail of its own."""
        core = self.core()
        until(core, "preempted")
        core.abort(["a"])
        [plan] = core.schedule(0)
        first, second = plan.scheduled
        assert (first.name, second.name) == ("b/0", "b/1")
        assert second.computed_before == 4
        assert second.num_tokens == first.num_tokens - 4
        tables = core.block_tables()
        assert tables["b/0"][0] == tables["b/1"][0]
        assert not set(tables["b/0"][1:]) & set(tables["b/1"][1:])
        assert (first.samples, second.samples) == (True, True)
        assert core.check_integrity() == []

    def test_its_tokens_are_those_of_an_undisturbed_run(self) -> None:
        """R27, R199: whatever was preempted on the way."""
        tight = self.core()
        disturbed = finish(tight)
        wide = make_v0(num_gpu_blocks=60)
        add(wide, "a", 8, 6)
        add(wide, "b", 6, 5, n=2)
        assert disturbed == finish(wide)
        assert tight.state.shared.num_cumulative_preemptions > 0
        assert {name: len(tokens) for name, tokens in disturbed.items()} == {"a/0": 6, "b/0": 5, "b/1": 5}
