"""What `quire policies --json` shows: all keys of a choice, with the values that the service uses."""

import json

import pytest

from scheduler_svc.core import presets
from scheduler_svc.policy.assembly import choose
from scheduler_svc.policy.choice import WorkerSize
from scheduler_svc.policy.keys import known_keys, limit_names

WORKER = WorkerSize(block_size=16, num_gpu_blocks=100, num_cpu_blocks=8, max_model_len=4096)


@pytest.mark.parametrize("name", presets.policy_names())
def test_effective_values_say_what_is_used(name: str) -> None:
    """R48: every key; given back as --set they change nothing, and those that a worker does not decide reach the core."""
    choice = choose(name)
    values = choice.effective()
    assert sorted(values) == known_keys()
    again = choose(name, [f"{key}={json.dumps(value)}" for key, value in values.items() if value is not None])
    assert again.spec == choice.spec and again.core_limits(WORKER) == choice.core_limits(WORKER)
    limits = choice.core_limits(WORKER)
    of_worker = {key for key in limit_names() if values[key] is None}
    assert all(getattr(limits, key) == values[key] for key in limit_names() if key not in of_worker)
    assert of_worker - {"max_num_batched_tokens"} == {"block_size", "num_gpu_blocks", "num_cpu_blocks", "max_model_len"}
    assert ("max_num_batched_tokens" in of_worker) == choice.spec.runs_whole(limits)


def test_effective_values_follow_what_is_given() -> None:
    """Given limits instead of defaults, and sequences that follow the budget."""
    values = choose("vllm-v1", ["max_num_batched_tokens=40", "async=true", "chunked_prefill=true"]).effective()
    assert (values["policy"], values["async"], values["max_num_batched_tokens"], values["max_num_seqs"]) == (
        "priority",
        True,
        40,
        40,
    )
    assert choose("vllm-v1", ["chunked_prefill=false"]).effective()["max_num_batched_tokens"] is None
