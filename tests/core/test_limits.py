"""What is refused when a core is built (R48) and what a spec checks by itself."""

from typing import Any

import pytest

from scheduler_svc.core.spec import abilities
from scheduler_svc.core.spec.policy_spec import knob_names
from svc_common.errors import ConfigError
from tests.support.core.v0_builders import make_chunked, make_v0


@pytest.mark.parametrize(
    ("preset", "given", "words"),
    [
        ("vllm-v0", {"max_num_batched_tokens": 63, "max_model_len": 64}, "without chunked prefill"),
        ("vllm-2023", {"max_num_batched_tokens": 63, "max_model_len": 64}, "without chunked prefill"),
        ("vllm-v1", {"max_num_batched_tokens": 63, "chunked_prefill": False}, "without chunked prefill"),
        ("vllm-v0-chunked", {"max_num_batched_tokens": 7, "max_num_seqs": 8}, "less than max_num_seqs"),
        ("vllm-v0", {"num_lookahead_slots": -1}, "num_lookahead_slots=-1.*at least 0"),
        ("vllm-v0", {"num_scheduler_steps": 0}, "num_scheduler_steps=0.*at least 1"),
        ("vllm-v0", {"delay_factor": -0.5}, "delay_factor"),
        ("vllm-v0", {"max_loras": 0}, "max_loras"),
        ("vllm-v0", {"preemption_mode": "drop"}, "preemption_mode='drop'.*recompute, swap"),
        ("vllm-v1", {"preemption_mode": "swap"}, "preemption_mode='swap'"),
        ("vllm-v0", {"num_gpu_blocks": 0}, "num_gpu_blocks"),
        ("vllm-v1", {"watermark_blocks": 0}, "watermark_blocks=0: needs a watermark"),
        ("vllm-v0", {"cache": "none", "watermark_blocks": 1}, "watermark_blocks=1: needs a watermark"),
        ("vllm-v0", {"num_gpu_blocks": 9, "watermark_blocks": 9}, "watermark_blocks=9: must be less than.*9"),
        ("vllm-2023", {"num_gpu_blocks": 9, "watermark_blocks": 10}, "watermark_blocks=10: must be less than.*9"),
    ],
)
def test_contradictions_are_refused_at_construction(preset: str, given: dict[str, Any], words: str) -> None:
    """R48: each with a ConfigError that names the field."""
    with pytest.raises(ConfigError, match=words):
        make_v0(preset, **given)


@pytest.mark.parametrize(
    ("preset", "given"),
    [
        ("vllm-v0", {"max_num_batched_tokens": 64, "max_model_len": 64}),
        ("vllm-v0-chunked", {"max_num_batched_tokens": 8, "max_model_len": 64, "max_num_seqs": 8}),
        ("vllm-v0", {"num_lookahead_slots": 0, "num_scheduler_steps": 1}),
        ("vllm-v0", {"num_gpu_blocks": 9, "watermark_blocks": 8}),
        ("vllm-v1", {"cache": "quire", "num_gpu_blocks": 9, "watermark_blocks": 2}),
    ],
)
def test_limits_that_just_fit_are_taken(preset: str, given: dict[str, Any]) -> None:
    """R48: equal numbers are no contradiction, and with chunks a budget may be below the model's length."""
    make_v0(preset, **given)


def test_chunks_of_whole_blocks_need_a_budget_of_whole_blocks() -> None:
    """R87: with prefix caching the budget must be a multiple of the block size; without it need not."""
    with pytest.raises(ConfigError, match="multiple of block_size"):
        make_chunked(max_num_batched_tokens=10, prefix_caching=True)
    make_chunked(max_num_batched_tokens=10)


def test_every_key_states_what_it_needs() -> None:
    """Each key is a part or a setting of one, and each ability that is needed is offered by some part."""
    assert {*abilities.PARTS, *abilities.SETTINGS} == set(knob_names())
    parts = [part for values in abilities.PARTS.values() for part in values.values()]
    needed = {need for part in [*parts, *abilities.SETTINGS.values()] for need in part.needs}
    assert needed <= {ability for part in parts for ability in part.offers}
