"""Policies and limits drawn at random, as far as they go together; pools are small, some fit one sequence only."""

import random
from dataclasses import dataclass
from typing import Any

from scheduler_svc.core import presets
from scheduler_svc.core.limits import CoreLimits
from scheduler_svc.core.spec import PolicySpec


@dataclass(frozen=True, slots=True)
class Setting:
    """What a core is built of."""

    spec: PolicySpec
    limits: CoreLimits


def random_setting(policy: str, rng: random.Random) -> Setting:
    """Knobs and limits for that preset."""
    v1 = presets.preset(policy).phases == "mixed"
    size = rng.choice([1, 2, 4, 4])
    model_len = rng.randint(8, 24)
    num_seqs = rng.randint(1, 5)
    spec = presets.preset(policy, **(_v1_knobs(policy, rng) if v1 else _v0_knobs(policy, rng)))
    caching = spec.sliding_window is None and rng.random() < 0.5
    chunked = spec.phases != "prefill_or_decode" and (policy == "vllm-v0-chunked" or rng.random() < 0.85)
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


def _v0_knobs(policy: str, rng: random.Random) -> dict[str, Any]:
    knobs: dict[str, Any] = {
        "policy": rng.choice(["fcfs", "priority"]),
        "preemption_mode": rng.choice([None, None, "swap", "recompute"]),
        "delay_factor": rng.choice([0.0, 0.0, 0.5, 2.0]),
        "max_loras": rng.choice([None, None, 1, 2]),
        "watermark_blocks": rng.choice([None, 0, 1]),
        "sliding_window": rng.choice([None, None, None, 4, 7]),
        "async_output": rng.random() < 0.25,
    }
    if policy != "vllm-2023":
        knobs["num_lookahead_slots"] = rng.choice([0, 0, 1, 5])
    if policy == "vllm-v0-chunked":
        knobs["num_scheduler_steps"] = rng.choice([1, 1, 4])
    if policy != "vllm-2023" and rng.random() < 0.2:
        knobs |= {"cache": "quire", "sliding_window": None}
    return knobs
