"""Random lives in which much decodes and little arrives, so that plans grant steps (`core/policies/mixed/decode_grants`)."""

import random

from scheduler_svc.core.composition import presets
from scheduler_svc.core.limits import CoreLimits, PoolSize
from scheduler_svc.observe.recording.token_alias import TokenAlias
from tests.support.core.preset_lives import happen
from tests.support.core.random_policies import Setting, with_groups, with_states
from tests.support.core.recorded_lives import KEY, RecordedLife

GRANTING = ("quire", "vllm-v1", "vllm-v1-async")
"""Presets with fast decode."""


def granting_life(
    policy: str,
    seed: int,
    *,
    num_events: int = 300,
    max_granted_steps: int = 7,
    num_workers: int = 1,
    grouped: bool = False,
    states: bool = False,
) -> RecordedLife:
    """One life from its first request to its last, recorded. The pool of some is short of blocks at times. `grouped`,
    `states`: of a model with them.
    """
    rng = random.Random(f"grants {policy} {seed}")
    limits = CoreLimits(
        block_size=8,
        num_gpu_blocks=rng.choice([20, 41, 201]),
        max_model_len=64,
        num_cpu_blocks=20 if policy == "quire" else 0,
        max_num_seqs=rng.choice([1, 4, 8]),
        max_num_batched_tokens=rng.choice([16, 64]),
        prefix_caching=rng.random() < 0.6,
        max_granted_steps=max_granted_steps,
    )
    pools = (PoolSize(limits.num_gpu_blocks, limits.num_cpu_blocks),) * num_workers if num_workers > 1 else ()
    setting = Setting(presets.preset(policy), limits, pools)
    setting = with_groups(setting, rng) if grouped else setting
    setting = with_states(setting, rng) if states else setting
    life = RecordedLife(setting, segment_steps=20, alias=TokenAlias(KEY))
    life.max_output = 40
    for _ in range(num_events):
        _happen(life, rng)
        life.check()
    life.drain()
    return life


def _happen(life: RecordedLife, rng: random.Random) -> None:
    """One event: a step or its result, seldom anything else. Sequences move between several workers."""
    life.move_one(rng)
    if not life.core.has_unfinished or rng.random() < 0.03:
        life.arrive(rng)
    elif rng.random() < 0.1:
        happen(life, 0.0, rng)
    elif life.can_schedule:
        life.schedule("ok")
    else:
        life.finish()
