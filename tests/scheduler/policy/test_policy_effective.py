"""What `quire policies --json` shows: all keys of a choice, with the values that the service uses."""

import json

import pytest

from scheduler_svc.core.composition import presets
from scheduler_svc.core.policies.mixed.rank_preemption import RankPreemption
from scheduler_svc.core.spec.abilities import unread_settings
from scheduler_svc.policy.assembly import choose
from scheduler_svc.policy.choice import WorkerSize
from scheduler_svc.policy.keys import known_keys, limit_names
from svc_common.errors import ConfigError

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
    assert ("max_num_batched_tokens" in of_worker) == choice.spec.runs_whole(chunked_prefill=limits.chunked_prefill)


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


@pytest.mark.parametrize("order", ["fcfs", "priority"])
def test_room_for_the_important_ends_with_the_order_that_it_needs(order: str) -> None:
    """Under another order than by age nothing makes way, and the values in force say so; asked for all the same, it is refused."""
    choice = choose("quire", [f"policy={order}"])
    core = choice.build(choice.core_limits(WORKER))
    assert not any(isinstance(part, RankPreemption) for part in core.workers[0].parts)
    values = choice.effective()
    assert (values["makes_way"], values["margin_s"], values["patience_s"]) == (False, None, None)
    with pytest.raises(ConfigError, match=r"makes_way=true: needs start times \(policy=aged\)"):
        choose("quire", [f"policy={order}", "makes_way=true"])


def test_a_change_of_order_while_running_ends_it_too() -> None:
    """`quire set-policy policy=fcfs` tells that it ended; asking for it under that order is refused."""
    changed = choose("quire").changed(["policy=fcfs"], "set-policy")
    assert changed.effective()["makes_way"] is False
    with pytest.raises(ConfigError, match="makes_way"):
        changed.changed(["makes_way=true"], "set-policy")
    assert changed.changed(["policy=aged", "makes_way=true"], "set-policy").spec == choose("quire").spec


_WORDS = {"policy": "priority", "scheduler_type": "stride", "defects": "recorded"}
"""Values of keys that take one of several words; of others it is a switch turned over, or 3."""


def _written(key: str, now: object) -> str:
    switched = "false" if now is True and key != "fast_path" else "true"
    return f"{key}={_WORDS.get(key, switched if isinstance(now, bool) else 3)}"


@pytest.mark.parametrize("name", presets.policy_names())
def test_every_key_is_in_force_or_refused(name: str) -> None:
    """A knob that no part of the policy reads is refused by name, and is null in the list."""
    choice = choose(name)
    unused = unread_settings(choice.spec)
    assert unused and all(choice.effective()[key] is None for key in unused)
    for key in unused:
        if key == "dp_size" and choice.spec.schedules_tasks:
            continue  # several ranks are another scheduler, which reads it
        with pytest.raises(ConfigError) as error:
            choose(name, [_written(key, getattr(choice.spec, key))])
        assert error.value.metadata["field"] == key and key in error.value.message


def test_an_order_that_the_phases_do_not_sort_by_is_refused() -> None:
    """v0 with chunked prefill has no priority preemption: the order by priority would be without effect."""
    assert choose("vllm-v0-chunked").effective()["policy"] is None
    with pytest.raises(ConfigError, match=r"needs a sorted queue \(phases=prefill_or_decode or mixed\)"):
        choose("vllm-v0", ["chunked_prefill=true", "policy=priority"])
