"""Sequences move to another worker group with their blocks; the contents are judged in the random lives."""

from collections.abc import Callable
from dataclasses import replace

import pytest

from block_manager.ledger import HOLE
from scheduler_svc.core.composition import presets
from scheduler_svc.core.limits import CoreLimits, PoolSize
from scheduler_svc.core.plan import StepPlan, StepResult
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.core.spec.policy_spec import PolicySpec
from scheduler_svc.core.workers import live_move
from tests.support.core.builders import make_request
from tests.support.core.granting_lives import GRANTING, granting_life
from tests.support.core.preset_lives import POLICIES, live

MOVING = [policy for policy in POLICIES if policy not in ("chitu-dp", "chitu-skew")]


def core_of(policy: str | PolicySpec = "quire", blocks: tuple[int, ...] = (20, 20), **limits: int) -> Scheduler:
    """A core of worker groups with so many blocks of 4 tokens."""
    values = {"block_size": 4, "num_gpu_blocks": max(blocks), "max_model_len": 64, "num_cpu_blocks": 4, **limits}
    pools = [PoolSize(num, 4) for num in blocks]
    return presets.build(policy, CoreLimits(**values), pools=pools)


def step(core: Scheduler, worker: int) -> StepPlan:
    """One step of a worker group, which samples token 7 for each row."""
    [plan] = core.schedule(0.0, worker)
    if not plan.is_empty:
        core.update(StepResult(plan.step, tokens={e.name: [7] for e in plan.scheduled if e.samples}))
    return plan


def decoding(core: Scheduler, num_prompt: int = 9, name: str = "a") -> str:
    """A request that has one token of worker group 0."""
    core.add(make_request(name, num_prompt, 20))
    step(core, 0)
    assert live_move.residence(f"{name}/0", core.workers) is not None
    return f"{name}/0"


def test_it_goes_on_where_it_moves() -> None:
    """Not preempted, no token computed again: the next plan there places its blocks and computes one token."""
    core = core_of()
    name = decoding(core)
    found = live_move.residence(name, core.workers)
    assert found is not None
    assert (found.worker, found.num_full, len(found.blocks), found.is_quiet) == (0, 2, 3, True)
    core.hold(name)
    assert not step(core, 0).scheduled
    assert core.hand_over(name, 1, "image")
    assert core.states[0].cache.ledger.tables == {}
    [told] = [step(core, 0)]
    assert told.left == [name]
    plan = step(core, 1)
    table = core.states[1].cache.ledger.tables[name]
    assert plan.placed == {"image": [(0, table[0]), (1, table[1]), (2, table[2])]}
    [entry] = plan.scheduled
    assert (entry.num_tokens, entry.computed_before, entry.fresh, entry.resumed) == (1, 9, True, False)
    assert [event.reason for event in told.events] == ["MOVED"]
    assert not step(core, 1).placed


def test_blocks_that_are_cached_there_are_shared() -> None:
    """Of an equal prompt only what is not cached there is placed."""
    core = core_of(prefix_caching=True)
    name = decoding(core)
    core.drain_worker(0)
    core.add(make_request("b", core.states[0].running[0].request.prompt_token_ids, 20))
    step(core, 1)
    core.hold(name)
    assert core.hand_over(name, 1, "image")
    ours, theirs = (core.states[1].cache.ledger.tables[n] for n in (name, "b/0"))
    assert ours[:2] == theirs[:2]
    assert step(core, 1).placed == {"image": [(2, ours[2])]}


@pytest.mark.parametrize("windows", [(0, 4), (4, 0, 9)])
def test_of_a_window_only_what_is_in_it_moves(windows: tuple[int, ...]) -> None:
    """Blocks behind it are HOLEs of the image, are freed there, and are no cached prefix there: they have no contents."""
    core = core_of(blocks=(80, 80), cache_windows=windows, prefix_caching=True)
    name = decoding(core, num_prompt=21)
    step(core, 0)
    found = live_move.residence(name, core.workers)
    assert found is not None and found.num_full == 5 * len(windows)
    held = [block for block in found.blocks if block != HOLE]
    assert len(held) == len(core.states[0].cache.ledger.gpu.hash_of) - core.states[0].cache.num_free_gpu - 1
    core.hold(name)
    assert core.hand_over(name, 1, "image")
    pool = core.states[1].cache.ledger.gpu
    assert pool.num_usable - pool.num_free == len(held)
    placed = step(core, 1).placed["image"]
    assert [found.blocks[at] for at, _ in placed] == held
    cached = {block for block, key in enumerate(pool.hash_of) if key is not None}
    assert len(cached) > len(windows) and cached <= {block for _, block in placed}
    assert core.check_integrity() == []


def test_states_move_last() -> None:
    """They change with every step, so they are not copied before the sequence is held."""
    core = core_of(blocks=(80, 80), cache_windows=(0,), num_state_blocks=3, checkpoint_tokens=8, prefix_caching=True)
    name = decoding(core)
    table = core.states[0].cache.ledger.tables[name]
    found = live_move.residence(name, core.workers)
    assert found is not None and found.num_full == 2
    assert found.blocks == (*table[3:], *table[:3])
    core.hold(name)
    assert core.hand_over(name, 1, "image")
    plan, table = step(core, 1), core.states[1].cache.ledger.tables[name]
    assert plan.placed == {"image": list(enumerate([*table[3:], *table[:3]]))}
    assert [(entry.computed_before, entry.num_tokens) for entry in plan.scheduled] == [(9, 1)]


def _aborted(core: Scheduler, name: str) -> None:
    core.abort([name.split("/", maxsplit=1)[0]])


def _lost(core: Scheduler, name: str) -> None:
    core.reset_sequences_of_lost_worker(0)


def _target_lost(core: Scheduler, name: str) -> None:
    core.reset_sequences_of_lost_worker(1)


def _drained(core: Scheduler, name: str) -> None:
    core.drain_worker(1)


def _filled(core: Scheduler, name: str) -> None:
    core.drain_worker(0)
    core.add(make_request("b", 50, 1))
    core.add(make_request("c", 20, 1))
    core.schedule(0.0, 1)


@pytest.mark.parametrize("befall", [_aborted, _lost, _target_lost, _drained, _filled])
def test_nothing_changes_where_it_cannot_go_on(befall: Callable[[Scheduler, str], None]) -> None:
    """It, or one of the worker groups, is not what it was when the move began."""
    core = core_of()
    name = decoding(core)
    core.hold(name)
    befall(core, name)
    before = core.block_tables()
    assert not core.hand_over(name, 1, "image")
    assert core.block_tables() == before
    assert core.check_integrity() == []


def test_it_takes_part_again_after_let_go() -> None:
    """A move that is given up costs steps, and nothing else."""
    core = core_of()
    name = decoding(core)
    core.hold(name)
    for _ in range(20):
        assert not step(core, 0).scheduled, "it is not ended as stuck"
    core.let_go(name)
    [entry] = step(core, 0).scheduled
    assert (entry.name, entry.num_tokens, entry.fresh) == (name, 1, False)


def test_what_does_not_move() -> None:
    """Prompts under way, samples that share blocks, models with states where drafts are verified."""
    core = core_of(max_num_batched_tokens=8, max_num_seqs=8)
    core.add(make_request("prompt", 20, 20))
    step(core, 0)
    assert live_move.movable(core.workers[0]) == []
    samples = core_of("vllm-v0")
    request = make_request("s", 9, 20)
    samples.add(replace(request, n=2))
    step(samples, 0)
    assert live_move.movable(samples.workers[0]) == []
    states = {"cache_windows": (0,), "num_state_blocks": 2, "checkpoint_tokens": 4}
    drafts = core_of(presets.preset("quire", num_spec_tokens=2), blocks=(80, 80), **states)
    drafts.add(make_request("w", 9, 20))
    assert step(drafts, 0).scheduled
    assert live_move.movable(drafts.workers[0]) == []


@pytest.mark.parametrize("policy", MOVING)
@pytest.mark.parametrize("seeds", [range(30), pytest.param(range(300), marks=pytest.mark.long)], ids=len)
def test_lives_in_which_sequences_move(policy: str, seeds: range) -> None:
    """R200: under every preset, with kills, drains, aborts and full pools; each sequence reads its own past."""
    assert sum(live(policy, seed, several=True).num_moved for seed in seeds) > 0


KINDS = {"groups": {"grouped": True}, "states": {"states": True}, "both": {"grouped": True, "states": True}}
"""Of models with more than one table for each sequence."""


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("policy", ["vllm-v1", "vllm-v1-async", "static", "quire", "chitu"])
@pytest.mark.parametrize("seeds", [range(6), pytest.param(range(100), marks=pytest.mark.long)], ids=len)
def test_lives_in_which_sequences_of_all_models_move(policy: str, kind: str, seeds: range) -> None:
    """With windows and with states."""
    moved = sum(live(policy, seed, several=True, **KINDS[kind]).num_moved for seed in seeds)
    assert moved > 0 or len(seeds) < 20


@pytest.mark.parametrize("policy", GRANTING)
@pytest.mark.parametrize("seeds", [range(3), pytest.param(range(60), marks=pytest.mark.long)], ids=len)
def test_moves_beside_granted_steps(policy: str, seeds: range) -> None:
    """A step that a worker begins by itself is without a sequence that came meanwhile."""
    lives = [granting_life(policy, seed, num_workers=2 + seed % 2) for seed in seeds]
    assert sum(life.num_moved for life in lives) > 0
    assert sum(life.num_repeats for life in lives) > 0


@pytest.mark.parametrize("policy", ["chitu", "quire"])
def test_a_worker_is_lost_while_a_sequence_sits_out(policy: str) -> None:
    """Held for a move, it starts again on the other worker group."""
    core = core_of(policy)
    name = decoding(core)
    core.hold(name)
    assert not step(core, 0).scheduled
    core.reset_sequences_of_lost_worker(0)
    assert [entry.name for entry in step(core, 1).scheduled] == [name]
