"""Random lives of a core whose inputs are written down."""

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

from scheduler_svc.core.parts.costs import Costs
from scheduler_svc.observe.recording import codec, file_format
from scheduler_svc.observe.recording.file_format import RecordingWriter
from scheduler_svc.observe.recording.recorder import RecordingCore
from scheduler_svc.observe.recording.segment_buffer import RecordingSegment, SegmentBuffer
from scheduler_svc.observe.recording.token_alias import TokenAlias
from svc_common.errors import ConfigError
from tests.support.core.lives import Life
from tests.support.core.preset_lives import happen
from tests.support.core.random_policies import Setting, random_setting, with_groups, with_states, with_workers

KEY = b"the same in every run of these tests"
_KNOBS: dict[str, list[Any]] = {
    "policy": ["fcfs", "priority", "aged"],
    "delay_factor": [0.0, 0.5, 2.0],
    "max_loras": [None, 1, 2],
    "preemption_mode": [None, "swap", "recompute"],
    "watermark_blocks": [0, 1],
}
_TASK_KNOBS: dict[str, list[Any]] = {
    "scheduler_type": ["fcfs", "stride", "prefill_first,request_preset"],
    "max_reqs": [None, 1, 2, 5],
    "prefill_chunk_size": [None, 3, 16],
    "max_decode_tasks": [None, 1, 3],
}
_LIMITS = ("num_gpu_blocks", "num_cpu_blocks", "max_num_batched_tokens", "max_num_seqs")


class RecordedLife(Life):
    """A life with a recorder. `buffer` holds what is recorded; `num_changes`: live changes of policy and limits."""

    def __init__(
        self, setting: Setting, *, segment_steps: int = 10, max_bytes: int = 2**30, alias: TokenAlias | None
    ) -> None:
        super().__init__(setting, rename=alias)
        self.alias = alias
        self.num_changes = 0
        self.buffer = SegmentBuffer(segment_steps, max_bytes)
        self.core: Any = RecordingCore(self.core, self.buffer, lambda: self._now)

    def change(self, rng: random.Random) -> None:
        """An operator changes something; what cannot be is refused, and nothing happens then. Costs change by themselves."""
        self.core.observe_costs(Costs(*(rng.choice([0.0, 0.01, 0.1]) for _ in range(3))))
        limits, spec = self.setting.limits, self.setting.spec
        knobs = _TASK_KNOBS if spec.schedules_tasks else _KNOBS
        key = rng.choice([*_LIMITS, *knobs])
        if key in knobs:
            spec = _or_same(spec, key, rng.choice(knobs[key]))
        else:
            most = rng.choice([1, 4]) + getattr(limits, key)
            least = getattr(limits, key) if key == "max_num_seqs" else most // 2
            limits = _or_same(limits, key, rng.randint(least, most))
        try:
            self.core.reconfigure(spec, limits)
        except ConfigError:
            return
        self.num_changes += (spec, limits) != (self.setting.spec, self.setting.limits)
        self.setting = Setting(spec, limits, self.setting.pools)

    def segments(self) -> list[RecordingSegment]:
        """The recording, as a reader sees it that did not record it."""
        return [codec.decode(codec.encode(segment, self.alias)) for segment in self.buffer.segments()]

    def write(self, path: Path) -> None:
        """A file of it."""
        segments = list(self.buffer.segments())
        with path.open("wb") as file:
            writer = RecordingWriter(file)
            writer.write(file_format.beginning({"verbatim": self.alias is None}))
            for segment in segments:
                writer.write(file_format.segment_frame(segment, self.alias))
            writer.finish(num_segments=len(segments), num_steps=sum(s.num_steps for s in segments))


def _or_same(choice: Any, key: str, value: Any) -> Any:
    """With the value, where it goes with the others."""
    try:
        return replace(choice, **{key: value})
    except ConfigError:
        return choice


def recorded(
    policy: str,
    seed: int,
    *,
    num_events: int = 0,
    changes: bool = True,
    alias: TokenAlias | None = None,
    grouped: bool = False,
    states: bool = False,
    **buffer: int,
) -> RecordedLife:
    """One random life under that policy, from its first request to its last. `grouped`: of a model with several cache
    groups; `states`: with states; `buffer`: of `RecordedLife`.
    """
    rng = random.Random(f"recorded {policy} {seed}")
    setting = random_setting(policy, rng)
    setting = with_groups(setting, rng) if grouped else setting
    setting = with_states(setting, rng) if states else setting
    life = RecordedLife(setting, alias=alias or TokenAlias(KEY), **buffer)
    busy = rng.choice([0.2, 0.6, 1.5])
    for _ in range(num_events or rng.randint(20, 120)):
        _happen(life, busy, rng, changes=changes)
        life.check()
    return _over(life)


def recorded_of_several(policy: str, seed: int) -> RecordedLife:
    """A life of several worker groups, which join, drain and are lost."""
    rng = random.Random(f"several {policy} {seed}")
    life = RecordedLife(with_workers(random_setting(policy, rng), rng), alias=TokenAlias(KEY))
    for _ in range(rng.randint(60, 120)):
        _happen(life, 0.6, rng, changes=True)
        life.change_workers(rng)
        life.check()
    return _over(life)


def recorded_steps(policy: str, seed: int, num_steps: int, *, segment_steps: int) -> RecordedLife:
    """The same with at least so many steps; only its end is checked."""
    rng = random.Random(f"recorded {policy} {seed}")
    life = RecordedLife(random_setting(policy, rng), alias=TokenAlias(KEY), segment_steps=segment_steps)
    while life.num_steps < num_steps:
        _happen(life, 0.6, rng, changes=True)
    return _over(life)


def _happen(life: RecordedLife, busy: float, rng: random.Random, *, changes: bool) -> None:
    happen(life, busy, rng)
    if changes and rng.random() < 0.05:
        life.change(rng)


def _over(life: RecordedLife) -> RecordedLife:
    life.drain()
    assert life.core.is_recording
    return life
