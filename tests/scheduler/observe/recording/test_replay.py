"""Recorded lives, replayed: every decision again, from every segment, in every process."""

import functools
import json
import os
import random
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from quire_tools.replay.what_if import one_life, what_if
from scheduler_svc.core.composition import presets
from scheduler_svc.core.limits import CoreLimits
from scheduler_svc.core.plan import StepResult
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.observe.recording import codec
from scheduler_svc.observe.recording.events import EVENTS, Added, PlanEvent
from scheduler_svc.observe.recording.file_format import Recording
from scheduler_svc.observe.recording.recorder import RecordingCore
from scheduler_svc.observe.recording.replay import ReplayReport, replay
from scheduler_svc.observe.recording.segment_buffer import RecordingSegment
from scheduler_svc.observe.recording.token_alias import TokenAlias
from tests.support.core.builders import answer, make_request
from tests.support.core.granting_lives import GRANTING, granting_life
from tests.support.core.preset_lives import happen
from tests.support.core.random_policies import random_setting
from tests.support.core.recorded_lives import KEY, RecordedLife, recorded, recorded_of_several, recorded_steps

ROOT = Path(__file__).parents[4]
POLICIES = presets.policy_names()
SEEDS = range(1)
VERY_LONG = ("quire", "vllm-v0")
Record = Callable[[str, object], None]
# What a `Scheduler` offers to observers; all else it offers is an input.
LOOKS = {
    "policy", "state", "depth", "has_unfinished", "has_endings_to_tell", "num_unfinished_groups", "request", "block_tables",
    "has_grant", "wants_step_back", "states", "ledger", "num_workers", "worker_of", "has_work", "runs_on", "has_worker_per_lane",
    "pool_report", "check_integrity", "view", "deadlines", "put", "dissolve_fast_rows",
    "pool_counts", "queue_lengths", "cached_blocks",
}  # fmt: skip


def _identical(report: ReplayReport) -> None:
    assert report.first_difference is None


@functools.cache
def segments_of(policy: str, seed: int) -> list[RecordingSegment]:
    """What is recorded of a life."""
    return recorded(policy, seed).segments()


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("seeds", [SEEDS, pytest.param(range(1, 8), marks=pytest.mark.long)], ids=len)
def test_replays_from_every_segment(policy: str, seeds: range) -> None:
    """R201: failed steps, lost workers, aborts, stop strings, beams, cached prefixes, drafts, live changes: all decisions again."""
    for seed in seeds:
        segments = segments_of(policy, seed)
        for start in range(0, len(segments), 1 + len(segments) // 4):
            report = replay(segments[start:])
            _identical(report)
            assert report.steps == sum(segment.num_steps for segment in segments[start:])


def test_the_lives_have_all_kinds_of_events() -> None:
    """R201: what `test_replays_from_every_segment` claims to replay does happen."""
    seen: Counter[type] = Counter()
    for policy in POLICIES:
        for seed in SEEDS:
            seen.update(type(event) for segment in segments_of(policy, seed) for event in segment.events)
    seen.update(type(event) for segment in granting_life("quire", 0).segments() for event in segment.events)
    for seed in range(8):
        seen.update(
            type(event) for segment in recorded_of_several("quire", seed).segments() for event in segment.events
        )
    assert [kind.__name__ for kind in EVENTS if not seen[kind]] == []


@pytest.mark.parametrize("policy", GRANTING)
@pytest.mark.parametrize("seeds", [(0,), pytest.param((0, 1), marks=pytest.mark.long)], ids=len)
def test_granted_steps_and_revocations_are_replayed(policy: str, seeds: tuple[int, ...]) -> None:
    """Plans of granted steps are made again where they were made, from the start of any segment."""
    lives = [granting_life(policy, seed) for seed in seeds]
    assert sum(life.num_repeats for life in lives) > 4 * len(seeds)
    for life in lives:
        segments = life.segments()
        for start in range(0, len(segments), 1 + len(segments) // 4):
            _identical(replay(segments[start:]))


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("seeds", [(0,), pytest.param(range(1, 8), marks=pytest.mark.long)], ids=len)
def test_lives_of_several_workers_are_replayed(policy: str, seeds: Sequence[int]) -> None:
    """Worker groups that join, drain, are lost and come back: all decisions again, from the start of any segment."""
    for seed in seeds:
        segments = recorded_of_several(policy, seed).segments()
        for start in range(0, len(segments), 1 + len(segments) // 4):
            _identical(replay(segments[start:]))


@pytest.mark.parametrize("policy", [name for name in POLICIES if presets.preset(name).has("cache groups")])
@pytest.mark.parametrize("seeds", [range(2), pytest.param(range(2, 12), marks=pytest.mark.long)], ids=len)
def test_lives_of_a_model_with_cache_groups_are_replayed(policy: str, seeds: range) -> None:
    """R201: all decisions again, from the start of any segment; each says the windows of the groups."""
    num_grouped = 0
    for seed in seeds:
        life = recorded(policy, seed, grouped=True)
        segments = life.segments()
        for start in range(0, len(segments), 1 + len(segments) // 4):
            windows = segments[start].about["limits"]["cache_windows"]
            assert tuple(windows) == life.setting.limits.cache_windows
            num_grouped += bool(windows)
            _identical(replay(segments[start:]))
    assert num_grouped


@pytest.mark.parametrize("policy", [name for name in POLICIES if presets.preset(name).has("cache groups")])
@pytest.mark.parametrize("seeds", [range(2), pytest.param(range(2, 12), marks=pytest.mark.long)], ids=len)
def test_lives_of_a_model_with_states_are_replayed(policy: str, seeds: range) -> None:
    """R201: also which states a step reads and keeps, from the start of any segment."""
    num_kept = 0
    for seed in seeds:
        segments = recorded(policy, seed, states=True, grouped=bool(seed % 2)).segments()
        for start in range(0, len(segments), 1 + len(segments) // 4):
            assert segments[start].about["limits"]["num_state_blocks"]
            _identical(replay(segments[start:]))
        decisions = [d for s in segments for e in s.events if isinstance(e, PlanEvent) for d in e.decisions]
        num_kept += sum(len(decision.states_to_keep) for decision in decisions)
    assert num_kept


def test_every_input_of_the_core_is_recorded() -> None:
    """A new method of `Scheduler` is either an input, which the recorder must know, or only looks in."""
    public = {name for name in vars(Scheduler) if not name.startswith("_")}
    of_recorder = {name for name in vars(RecordingCore) if not name.startswith("_")}
    assert public - of_recorder == LOOKS


def test_another_core_of_the_process_begins_a_segment() -> None:
    """After a fault in planning the scheduler builds another core; what that does is replayed from a snapshot of its own."""
    first = recorded("vllm-v1", 1, segment_steps=100_000, changes=False)
    again = RecordedLife(first.setting, segment_steps=100_000, alias=first.alias)
    again.core = RecordingCore(again.core.core, first.buffer, lambda: again._now)
    again.core.step = first.core.step
    rng = random.Random(2)
    for _ in range(60):
        happen(again, 0.6, rng)
    again.drain()
    segments = first.segments()
    assert [segment.goes_on for segment in segments] == [False, False]
    report = replay(segments)
    _identical(report)
    assert report.steps == first.num_steps + again.num_steps


def test_mask_times_of_the_fast_path_are_recorded() -> None:
    """Of results that are one token per sequence: whose masks held a step up sits out, again in a replay."""
    life = RecordedLife(random_setting("quire", random.Random(1)), alias=TokenAlias(KEY))
    limits = CoreLimits(block_size=16, num_gpu_blocks=64, max_model_len=256, max_num_seqs=4, max_num_batched_tokens=64)
    life.core = RecordingCore(presets.build("quire", limits, rename=life.alias), life.buffer, lambda: life._now)
    for name in "ab":
        life.core.add(make_request(name, 3, 40))
    num_columns = 0
    for _ in range(12):
        [plan] = life.core.schedule(life._now)
        result = replace(answer(plan), duration_s=1.0)
        if plan.fast is not None and len(plan.fast.rows) == len(plan.scheduled) == 2:
            result = StepResult(plan.step, {}, column=np.array([7, 8]), mask_s={"a/0": 0.3}, duration_s=1.0)
            num_columns += 1
        life.core.update(result)
    assert num_columns >= 2
    _identical(replay(life.segments()))


@pytest.mark.parametrize("policy", ["quire", pytest.param("vllm-v0", marks=pytest.mark.long)])
def test_replays_in_another_process(policy: str, tmp_path: Path) -> None:
    """R201: read from its file by a process that hashes with another seed."""
    path = tmp_path / "life.rec"
    life = recorded(policy, 1, num_events=150)
    life.write(path)
    command = [sys.executable, "-m", "tests.scheduler.observe.recording.test_replay", str(path)]
    told = _run(command, "2" if os.environ.get("PYTHONHASHSEED") == "1" else "1")
    assert told.split() == ["True", str(life.num_steps)]


@pytest.mark.parametrize("policy", ["quire", "vllm-v0", "vllm-v1-async"])
def test_a_long_run(policy: str, record_property: Record) -> None:
    """R201: a piece of what `test_a_very_long_run` does."""
    record_property("size", _long_run(policy, 150))


@pytest.mark.soak
@pytest.mark.timeout(900)
@pytest.mark.parametrize("policy", POLICIES)
def test_a_very_long_run(policy: str, record_property: Record) -> None:
    """R201: long runs with all features replay decision-identical, also from the middle: 10,000 steps, or 2,000 for slow ones."""
    record_property("size", _long_run(policy, 10_000 if policy in VERY_LONG else 2_000))


@pytest.mark.soak
@pytest.mark.timeout(600)
def test_a_very_long_run_in_another_process_and_what_if_of_it(tmp_path: Path, record_property: Record) -> None:
    """R201: 10,000 steps in a file, again in a process that hashes otherwise; asked what if, in under a minute of CPU."""
    path = tmp_path / "long.rec"
    life = recorded_steps("quire", 1, 10_000, segment_steps=1_000)
    life.write(path)
    command = [sys.executable, "-m", "quire", "replay", str(path), "--json"]
    again = json.loads(_run(command, "3"))
    assert (again["identical"], again["steps"] >= 10_000) == (True, True)
    start = time.process_time()
    asked = what_if(one_life(Recording(path).segments()), "vllm-v1", [])
    seconds = time.process_time() - start
    record_property("size", f"what-if of {again['steps']} steps: {asked.num_requests} requests, {seconds:.0f} s of CPU")
    assert asked.steps > 1_000
    assert seconds < 60


def _run(command: list[str], hash_seed: str) -> str:
    environ = {**os.environ, "PYTHONHASHSEED": hash_seed}
    done = subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True, timeout=500, check=True)
    return done.stdout


def _long_run(policy: str, num_steps: int) -> str:
    start = time.process_time()
    life = recorded_steps(policy, 0, num_steps, segment_steps=max(50, num_steps // 10))
    segments = life.segments()
    _identical(replay(segments))
    middle = segments[len(segments) // 2 :]
    _identical(replay(middle))
    seconds = time.process_time() - start
    return (
        f"{policy}: {life.num_steps} steps, {life.num_changes} live changes, {len(segments)} segments, {seconds:.0f} s"
    )


def test_the_first_difference_is_told() -> None:
    """A recording of other decisions: step, field, and both values."""
    segments = recorded("vllm-v1", 2).segments()
    decision = next(
        e for s in segments for e in s.events if isinstance(e, PlanEvent) and e.decisions[0].shape.names
    ).decisions[0]
    decision.free_gpu += 1
    found = replay(segments).first_difference
    assert found is not None
    assert (found.step, found.field) == (decision.step, "free_gpu")
    assert found.recorded == found.got + 1


def test_a_missing_input_is_noticed() -> None:
    """R201: without one of its requests the life is another one."""
    segments = recorded("vllm-v1", 2).segments()
    events = next(s.events for s in segments if any(isinstance(e, Added) and not e.refused for e in s.events))
    events.remove(next(e for e in events if isinstance(e, Added) and not e.refused))
    assert replay(segments).first_difference is not None


def test_bytes_are_a_matter_of_the_life_alone() -> None:
    """R201: the same life recorded twice makes the same bytes, so that recordings can be compared."""
    first, second = (recorded("vllm-v1", 3) for _ in range(2))
    pairs = zip(first.buffer.segments(), second.buffer.segments(), strict=True)
    assert all(codec.encode(a, first.alias) == codec.encode(b, second.alias) for a, b in pairs)


if __name__ == "__main__":
    recording = Recording(Path(sys.argv[1]))
    found = replay(recording.segments())
    sys.stdout.write(f"{found.identical} {found.steps}\n")
