"""Scenario number N: policy, limits, arrivals and faults; everything follows from N."""

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from quire_tools.simulation.arrivals import Arrival
from quire_tools.simulation.cost_model import CostModel
from quire_tools.simulation.faults import Faults
from quire_tools.simulation.token_model import EOS, PseudoTokens, mix
from scheduler_svc.core.composition import presets
from scheduler_svc.core.limits import CoreLimits
from scheduler_svc.core.request import Request
from scheduler_svc.core.request_rules import BeamRules, StopRules
from svc_common.errors import ConfigError
from tests.support.core.random_policies import Setting, random_setting, with_groups, with_workers

EARLY_STOPPING: tuple[bool | str, ...] = (True, False, "never")
_ATTEMPTS = 50


@dataclass(frozen=True, slots=True)
class Scenario:
    """`seed` names it, with `policy` if that was chosen. `times_s`: when requests come.

    `faults_of`: of the workers beside the first.
    """

    seed: int
    setting: Setting
    cost: CostModel
    faults: Faults
    times_s: tuple[float, ...]
    faults_of: Mapping[int, Faults] = field(default_factory=dict)

    @property
    def policy(self) -> str:
        """The preset."""
        return self.setting.spec.name

    def tokens(self) -> PseudoTokens:
        """The model."""
        return PseudoTokens(self.seed, eos_every=24, vocab_size=98)

    def arrivals(self) -> list[Arrival]:
        """The requests, made anew: one serves once."""
        rng = random.Random(f"requests {self.seed}")
        return [_arrival(number, at_s, self.setting, rng) for number, at_s in enumerate(self.times_s)]


def scenario_of_several(seed: int, policy: str | None = None) -> Scenario:
    """The same scenario with one to four worker groups, of equal or unequal sizes; each has faults of its own."""
    one, rng = scenario(seed, policy), random.Random(f"several {seed}")
    if one.setting.spec.has("ranks"):
        return one
    setting = with_workers(one.setting, rng)
    horizon_s = (one.times_s[-1] if one.times_s else 0.0) + 40 * one.cost.base_s
    faults = {number: replace(Faults.random(rng, horizon_s), jumps=()) for number in range(1, len(setting.pools))}
    return replace(one, setting=setting, faults_of=faults)


def scenario_of_groups(seed: int, policy: str | None = None) -> Scenario:
    """The same scenario for a model with several cache groups, under a policy that serves them."""
    rng = random.Random(f"groups {seed}")
    names = [name for name in presets.policy_names() if presets.preset(name).has("cache groups")]
    one = scenario(seed, policy or rng.choice(names))
    return replace(one, setting=with_groups(one.setting, rng))


def scenario(seed: int, policy: str | None = None) -> Scenario:
    """The scenario of that number, under a policy of its own choice unless one is given."""
    rng = random.Random(f"scenario {seed}")
    names = presets.policy_names()
    chosen = rng.choice(names)
    setting = setting_for(policy or chosen, rng)
    cost = rng.choice(COSTS)
    times = PATTERNS[rng.randrange(len(PATTERNS))](rng, rng.randint(1, 14), cost.base_s)
    horizon_s = (times[-1] if times else 0.0) + 40 * cost.base_s
    faults = Faults.random(rng, horizon_s) if rng.random() < 0.8 else Faults()
    return Scenario(seed, setting, cost, faults, tuple(times))


COSTS = (
    CostModel(base_s=1.0),
    CostModel(base_s=0.5, prefill_token_s=0.05, decode_seq_s=0.05, schedule_s=0.2, wire_s=0.1),
    CostModel(base_s=0.2, prefill_token_s=0.02, context_token_s=0.005, moved_block_s=0.1, schedule_s=0.3, noise=0.5),
    CostModel(base_s=0.01, prefill_token_s=0.2, pair_s=0.01, schedule_s=0.001, wire_s=1.0),
)


def setting_for(policy: str, rng: random.Random) -> Setting:
    """Keys and limits at random; contradictory ones are drawn again. A preset without drawn keys keeps its own."""
    for _ in range(_ATTEMPTS):
        try:
            setting = random_setting(policy, rng)
            presets.build(setting.spec, setting.limits)
        except ConfigError:
            continue
        return setting
    return _plain(policy, rng)


def _plain(policy: str, rng: random.Random) -> Setting:
    """The preset as it is, with limits that any policy takes."""
    size, model_len = rng.choice([1, 2, 4]), rng.randint(8, 24)
    one = -(-model_len // size)
    limits = CoreLimits(
        block_size=size,
        num_gpu_blocks=rng.choice([one + 1, 2 * one, 4 * one]),
        num_cpu_blocks=rng.choice([0, 6]),
        max_model_len=model_len,
        max_num_seqs=rng.randint(1, 5),
        max_num_batched_tokens=24 + size * rng.randint(0, 4),
        prefix_caching=rng.random() < 0.5,
    )
    return Setting(presets.preset(policy), limits)


# --- when they come ---------------------------------------------------------------------------------------------------


def _steady(rng: random.Random, count: int, step_s: float) -> list[float]:
    """One after the other, at random."""
    times, at_s, gap_s = [], 0.0, step_s * rng.choice([0.3, 1.0, 4.0])
    for _ in range(count):
        at_s += rng.expovariate(1 / gap_s)
        times.append(at_s)
    return times


def _at_once(rng: random.Random, count: int, step_s: float) -> list[float]:
    """All at the same moment."""
    return [0.0] * count


def _in_bursts(rng: random.Random, count: int, step_s: float) -> list[float]:
    """Crowds with nothing between them."""
    num_bursts = rng.randint(1, 3)
    starts = [rng.uniform(0, 30) * step_s for _ in range(num_bursts)]
    return sorted(rng.choice(starts) for _ in range(count))


def _one_then_idle(rng: random.Random, count: int, step_s: float) -> list[float]:
    """So far apart that everything is over in between."""
    return [100.0 * step_s * number for number in range(min(count, 4))]


Pattern = Callable[[random.Random, int, float], list[float]]
PATTERNS: tuple[Pattern, ...] = (_steady, _steady, _at_once, _in_bursts, _one_then_idle)


# --- arrivals ---------------------------------------------------------------------------------------------------------


def _arrival(number: int, at_s: float, setting: Setting, rng: random.Random) -> Arrival:
    limits, spec = setting.limits, setting.spec
    length = rng.randint(1, limits.max_model_len - 1 if rng.random() < 0.3 else min(9, limits.max_model_len - 1))
    family = rng.choice([0, 0, 1, number + 5])
    n = min(rng.choice([1, 1, 1, 1, 1, 2, 3]), limits.max_num_seqs)
    best_of = min(n + (n > 1 and rng.random() < 0.3), limits.max_num_seqs)
    beam = None
    if best_of > 1 and rng.random() < 0.4:
        beam = BeamRules(rng.choice([0.0, 1.0, 2.0]), EARLY_STOPPING[rng.randrange(3)])
    request = Request(
        f"r{number}",
        [100 + mix(family, i) % 50 for i in range(length)],
        _stop_rules(rng),
        at_s,
        priority=rng.randint(0, 2),
        n=n,
        best_of=best_of,
        beam=beam,
        lora_id=rng.choice([0, 0, 1, 2, 3]) if spec.max_loras is not None else 0,
        cache_salt=rng.choice(["", "", "x"]),
        no_cache_reuse=rng.random() < 0.05,
    )
    return Arrival(
        at_s,
        request,
        leaves_at_s=at_s + rng.uniform(0, 15) if rng.random() < 0.1 else None,
        stop_string_at=rng.randint(1, 6) if beam is None and rng.random() < 0.1 else None,
        deadline_s=at_s + rng.choice([0.5, 5.0, 30.0]) if rng.random() < 0.1 else None,
    )


def _stop_rules(rng: random.Random) -> StopRules:
    max_tokens = rng.randint(1, 10)
    return StopRules(
        max_tokens=max_tokens,
        min_tokens=min(rng.choice([0, 0, 3]), max_tokens),
        ignore_eos=rng.random() < 0.2,
        eos_token_ids=frozenset([EOS]),
        stop_token_ids=frozenset([rng.randint(1, 97)]) if rng.random() < 0.1 else frozenset(),
    )


def undisturbed(given: Scenario) -> Scenario:
    """The same requests one after the other, with room for all, where nothing goes wrong and none is cancelled."""
    roomy = replace(given.setting.limits, num_gpu_blocks=4_096, num_cpu_blocks=0)
    far_apart = tuple(1_000.0 * number for number in range(len(given.times_s)))
    setting = replace(given.setting, limits=roomy, pools=())
    return replace(given, setting=setting, faults=Faults(), faults_of={}, times_s=far_apart)
