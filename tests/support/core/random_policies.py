"""Policies and limits drawn at random, as far as they go together; pools are small, some fit one sequence only."""

import random
from dataclasses import dataclass, replace
from typing import Any

from scheduler_svc.core.composition import presets
from scheduler_svc.core.limits import CoreLimits, PoolSize
from scheduler_svc.core.spec.policy_spec import PolicySpec


@dataclass(frozen=True, slots=True)
class Setting:
    """What a core is built of."""

    spec: PolicySpec
    limits: CoreLimits
    pools: tuple[PoolSize, ...] = ()

    @property
    def windows(self) -> list[int | None]:
        """Of each cache group, the tokens that its layers look back; None: all. Vllm 2023 frees no blocks."""
        one = None if self.spec.cache == "vllm_2023" else self.spec.sliding_window
        return [window or None for window in self.limits.cache_windows] or [one]


def random_setting(policy: str, rng: random.Random) -> Setting:
    """Knobs and limits for that preset."""
    base = presets.preset(policy)
    v1 = base.phases == "mixed"
    size = rng.choice([1, 2, 4, 4])
    model_len = rng.randint(8, 24)
    num_seqs = rng.randint(1, 5)
    of_policy = _quire_knobs if policy == "quire" else _v1_knobs if v1 else _v0_knobs
    if base.schedules_tasks:
        of_policy = _chitu_knobs
    knobs = of_policy(policy, rng)
    if knobs.get("cache") != "none":
        knobs["sliding_window"] = rng.choice([None, None, None, 4, 7])
    spec = presets.preset(policy, **knobs)
    caching = (spec.sliding_window is None or not spec.is_v0) and rng.random() < 0.5
    chunked = spec.phases != "prefill_or_decode" and (policy == "vllm-v0-chunked" or rng.random() < 0.85)
    if spec.schedules_tasks:
        chunked = spec.prefill_chunk_size is not None
    budget = rng.randint(num_seqs, 24) if chunked else model_len + rng.randint(0, 12)
    if policy == "vllm-v0-chunked" and caching:
        budget += -budget % size
    limits = CoreLimits(
        block_size=size,
        num_gpu_blocks=_num_blocks(size, model_len, rng),
        num_cpu_blocks=rng.choice([0, 2, 6, 20]),
        max_model_len=model_len,
        max_num_seqs=num_seqs,
        max_num_batched_tokens=max(budget, num_seqs),
        prefix_caching=caching,
        chunked_prefill=chunked,
        long_prefill_token_threshold=rng.choice([0, 0, 1, 3]) if v1 else 0,
    )
    return Setting(spec, limits)


def with_workers(setting: Setting, rng: random.Random) -> Setting:
    """The same for one to four worker groups; one has all blocks of the limits, some of the others fewer.

    Data-parallel ranks are one group.
    """
    if setting.spec.phases == "ranks":
        return setting
    blocks, on_host = setting.limits.num_gpu_blocks, setting.limits.num_cpu_blocks
    pools = [PoolSize(blocks, on_host)]
    for _ in range(rng.randint(0, 3)):
        fewer = rng.choice([0, 0, rng.randint(0, blocks - 2)])
        pools.append(PoolSize(blocks - fewer, rng.choice([on_host, on_host // 2])))
    rng.shuffle(pools)
    placement = rng.choice(["prefix_affinity", "prefix_affinity", "least_work", "round_robin"])
    return Setting(replace(setting.spec, placement=placement), setting.limits, tuple(pools))


def with_groups(setting: Setting, rng: random.Random) -> Setting:
    """The same for a model with two or three cache groups, with as many blocks for each; as it is if its cache rules serve
    no groups.
    """
    spec, limits = setting.spec, setting.limits
    if not spec.has("cache groups"):
        return setting
    windows = rng.choice([(0, 4), (4, 0), (0, 1), (0, 7, 7), (3, 0, 9), (5, 9), (0, 0)])
    blocks, on_host = (limits.num_gpu_blocks - 1) * len(windows) + 1, limits.num_cpu_blocks * len(windows)
    grouped = replace(limits, num_gpu_blocks=blocks, num_cpu_blocks=on_host, cache_windows=windows)
    return Setting(replace(spec, sliding_window=None), grouped)


def with_states(setting: Setting, rng: random.Random) -> Setting:
    """The same for a model with states, of one cache group or of several, under a policy that serves it."""
    spec, limits = setting.spec, setting.limits
    if not spec.has("cache groups"):
        spec = replace(spec, cache="v1_pool")
    num_states, num_groups = rng.randint(1, 3), len(limits.cache_windows) or 1
    num_seqs = rng.choice([1, 1, 2, 4])
    windows = limits.cache_windows or rng.choice([(), (0,), (spec.sliding_window or 0,)])
    with_them = replace(
        limits,
        num_gpu_blocks=limits.num_gpu_blocks + num_states * num_seqs,
        num_cpu_blocks=limits.num_cpu_blocks and limits.num_cpu_blocks + num_states * num_groups,
        prefix_caching=limits.prefix_caching or rng.random() < 0.6,
        cache_windows=windows,
        num_state_blocks=num_states,
        checkpoint_tokens=limits.block_size * rng.choice([1, 1, 2, 3]),
    )
    return Setting(replace(spec, sliding_window=None), with_them)


def _num_blocks(size: int, model_len: int, rng: random.Random) -> int:
    """From a pool that holds one sequence (or less) to one that holds some."""
    one = -(-model_len // size)
    return rng.choice([max(2, one // 2), one, one + 1, one + 2, 2 * one, 4 * one])


def _v1_knobs(policy: str, rng: random.Random) -> dict[str, Any]:
    knobs: dict[str, Any] = {
        "policy": rng.choice(["fcfs", "priority"]),
        "max_loras": rng.choice([None, None, 1, 2]),
        "cache": rng.choice(["v1_pool", "v1_pool", "quire", "quire", "none"]),
    }
    if knobs["cache"] == "quire":
        knobs["watermark_blocks"] = rng.choice([None, 0, 1])
    if policy == "vllm-v1-async":
        knobs["batch_queue"] = rng.choice([1, 2, 2, 3])
        knobs["num_spec_tokens"] = rng.choice([0, 0, 1, 2])
    return knobs


def _quire_knobs(policy: str, rng: random.Random) -> dict[str, Any]:
    """Mostly the parts of the preset; costs that make swapping the cheaper way for some victims, for all or for none."""
    compute_token_s = rng.choice([0.0, 0.1, 0.1, 0.1])
    knobs: dict[str, Any] = {
        "policy": rng.choice(["aged", "aged", "aged", "fcfs", "priority"]),
        "max_loras": rng.choice([None, None, 1, 2]),
        "cache": rng.choice(["quire", "quire", "quire", "quire", "v1_pool"]),
        "batch_queue": rng.choice([1, 2, 2, 3]),
        "num_spec_tokens": rng.choice([0, 0, 0, 1, 2]),
        "preemption_mode": rng.choice([None, None, None, "recompute", "swap"]),
        "patience_s": rng.choice([0.0, 3.0, 10.0]),
        "margin_s": rng.choice([0.0, 1.0]),
        "restraint": rng.choice([None, "expected_peak"]),
        "caution": rng.choice([0.0, 0.5, 1.0, 2.0]),
        "deadlines": rng.random() < 0.8,
        "compute_token_s": compute_token_s,
        "swap_block_s": rng.choice([0.0, 0.02, 0.1, 0.2, 10.0]),
        "step_s": rng.choice([0.0, 0.1]),
        "chunk_s": rng.choice([0.0, 0.15, 0.3]),
    }
    if knobs["cache"] == "quire":
        knobs["watermark_blocks"] = rng.choice([None, 0, 1])
    elif knobs["preemption_mode"] == "swap":
        knobs["preemption_mode"] = None
    return knobs


def _chitu_knobs(policy: str, rng: random.Random) -> dict[str, Any]:
    """Any mixture of scorers, strict modes too, which let some requests end unserved."""
    words = ["fcfs", "prefill_first", "request_preset", "stride", "deadline", "prefix_align"]
    knobs: dict[str, Any] = {
        "scheduler_type": ",".join(rng.sample(words, rng.randint(1, 3))),
        "max_reqs": rng.choice([None, None, 1, 2, 4, 9]),
        "prefill_chunk_size": rng.choice([None, None, 1, 2, 5, 9]),
    }
    if rng.random() < 0.1:
        knobs["scheduler_type"] = rng.choice(["prefill_only", "decode_only, stride", "prefill_only,decode_only"])
    if policy == "chitu-dp":
        return knobs | {"dp_size": rng.choice([1, 2, 2, 3]), "dp_prefix_affinity": rng.choice([None, 0, 1, 4])}
    knobs["pp_size"] = rng.choice([1, 1, 2, 3])
    if policy == "chitu" and rng.random() < 0.3:
        knobs |= {"prefill_num_tasks_divided_by_pp": False, "prefill_num_tasks": rng.randint(1, 3)}
        knobs |= {"enforce_decode_num_tasks_max": False, "decode_num_tasks": rng.randint(1, 3)}
    if rng.random() < 0.2:
        knobs["num_scheduler_groups"] = rng.randint(1, 3)
    return knobs


def _v0_knobs(policy: str, rng: random.Random) -> dict[str, Any]:
    knobs: dict[str, Any] = {
        "policy": rng.choice(["fcfs", "priority"]),
        "preemption_mode": rng.choice([None, None, "swap", "recompute"]),
        "delay_factor": rng.choice([0.0, 0.0, 0.5, 2.0]),
        "max_loras": rng.choice([None, None, 1, 2]),
        "watermark_blocks": rng.choice([None, 0, 1]),
        "async_output": rng.random() < 0.25,
    }
    if policy != "vllm-2023":
        knobs["num_lookahead_slots"] = rng.choice([0, 0, 1, 5])
    if policy == "vllm-v0-chunked":
        knobs["num_scheduler_steps"] = rng.choice([1, 1, 4])
    if policy != "vllm-2023" and rng.random() < 0.2:
        knobs["cache"] = "quire"
    return knobs
