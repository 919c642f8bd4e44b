"""A random life of a core under a preset, from its seed: what happens to it, one thing after another."""

import random

from tests.support.core.lives import FATES, Life
from tests.support.core.random_policies import random_setting, with_groups, with_states, with_workers

POLICIES = (
    "vllm-2023",
    "vllm-v0",
    "vllm-v0-chunked",
    "vllm-v1",
    "vllm-v1-async",
    "static",
    "quire",
    "chitu",
    "chitu-skew",
    "chitu-dp",
)


def live(policy: str, seed: int, *, several: bool = False, grouped: bool = False, states: bool = False) -> Life:
    """One random life from its first request to its last. `several`: of one to four worker groups; `grouped`: of a model with
    several cache groups; `states`: with states.
    """
    rng = random.Random(f"{policy} {seed}")
    setting = random_setting(policy, rng)
    setting = with_groups(setting, rng) if grouped else setting
    setting = with_states(setting, rng) if states else setting
    life = Life(with_workers(setting, rng) if several else setting)
    busy = rng.choice([0.2, 0.6, 1.5])
    for _ in range(rng.randint(20, 120)):
        happen(life, busy, rng)
        life.check()
    life.drain()
    return life


def happen(life: Life, busy: float, rng: random.Random) -> None:
    """One event: mostly steps."""
    if life.num_workers > 1 and rng.random() < 0.02:
        life.lose_worker()
    if life.num_workers > 1:
        life.move_one(rng)
    dice = rng.random()
    if dice < 0.04:
        life.abort(rng.randint(0, life.count + 1))
    elif dice < 0.07:
        life.stop_string(rng.randint(0, life.count + 1), rng.randint(0, 2), rng.randint(1, 6))
    elif dice < 0.075:
        life.lose_worker()
    elif dice < 0.08:
        life.reset_prefixes()
        life.warm_up(on=dice < 0.0775)
    elif dice < 0.08 + busy / 4:
        life.arrive(rng)
    elif life.can_schedule and (not life.num_underway or rng.random() < 0.7):
        life.guess(rng)
        life.schedule(rng.choice(FATES) if rng.random() < 0.2 else "ok")
    elif life.num_underway:
        life.finish()
