"""Sliding windows from the model to the ledger: where all layers have one, blocks behind it are freed (R105)."""

from collections.abc import Callable
from typing import Any

import pytest

from quire import LLM, SamplingParams
from tests.support.checkpoints import SLIDING_WINDOW, make_checkpoint
from tests.worker.engine.families import Family

BLOCK_SIZE = 16
MOST = SLIDING_WINDOW // BLOCK_SIZE + 2
PROMPTS = [list(range(7)), list(range(3, 60)), list(range(90, 95))]


@pytest.fixture(scope="module")
def mistral(tmp_path_factory: pytest.TempPathFactory) -> Family:
    return Family("mistral", make_checkpoint("mistral", tmp_path_factory.mktemp("window") / "mistral"))


def run(model: Family, policy: str, num_tokens: int, num_blocks: int, **options: Any) -> tuple[list[int], int]:
    """The most blocks that each sequence had after a step behind its prompt, and how many preemptions there were."""
    sizes = {"max_model_len": num_tokens + 64, "max_num_batched_tokens": num_tokens + 64}
    options = {"dtype": "float32", "num_gpu_blocks_override": num_blocks} | sizes | options
    held = [0] * len(PROMPTS)
    with LLM(model.path, block_size=BLOCK_SIZE, policy=policy, **options) as llm:
        params = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)
        for i, prompt in enumerate(PROMPTS):
            llm.add_request(str(i), prompt, params)
        core = llm._backend._core  # type: ignore[attr-defined]
        found, ledger = {}, core.state.cache.ledger
        while llm.has_unfinished_requests():
            found |= {output.request_id: output.outputs[0].token_ids for output in llm.step() if output.finished}
            tables = {name.partition("/")[0]: set(table) - ledger.gpu.reserved for name, table in ledger.tables.items()}
            for i in range(len(PROMPTS)):
                sequence = core.request(str(i))
                if sequence and sequence.groups and sequence.sequences[0].num_output_tokens > 2:
                    held[i] = max(held[i], len(tables.get(str(i), ())))
        num_preemptions = core.state.shared.num_cumulative_preemptions
        counts = core.pool_report().gpu
        assert counts.free == counts.total
    for i, prompt in enumerate(PROMPTS):
        assert list(found[str(i)]) == model.greedy(prompt, num_tokens).token_ids
    return held, num_preemptions


@pytest.mark.parametrize(
    "policy", ["quire", *(pytest.param(name, marks=pytest.mark.long) for name in ("vllm-v1", "chitu"))]
)
def test_few_blocks_are_held(mistral: Family, policy: str, record_property: Callable[[str, object], None]) -> None:
    """R105: window / block + 2 blocks at most, and the tokens of generate."""
    held, _ = run(mistral, policy, 60, 40)
    assert max(held) <= MOST and min(held) == MOST
    record_property("size", f"sliding window under {policy}: {max(held)} blocks of {BLOCK_SIZE} tokens for 60 tokens")


@pytest.mark.parametrize(
    ("policy", "sets"), [("quire", {"preemption_mode": "swap", "restraint": None}), ("vllm-v1", {})]
)
def test_few_blocks_are_held_under_preemption(mistral: Family, policy: str, sets: dict[str, Any]) -> None:
    """R73, R105: the same in a pool that has room for two of three, moved to the host or computed again."""
    held, num_preemptions = run(mistral, policy, 60, 9, policy_set=sets, swap_space="4MiB")
    assert max(held) <= MOST and num_preemptions


@pytest.mark.long
@pytest.mark.parametrize("policy", ["quire", "vllm-v1-async", "vllm-v0", "chitu", "vllm-v0-chunked"])
def test_few_blocks_are_held_for_long(
    mistral: Family, policy: str, record_property: Callable[[str, object], None]
) -> None:
    """R105: the same over 1,000 tokens; v0 without prefix caching, as its block managers know only one of the two."""
    held, _ = run(mistral, policy, 1000, 250, enable_prefix_caching=not policy.startswith("vllm-v0"))
    assert max(held) <= MOST
    record_property(
        "size", f"sliding window under {policy}: {max(held)} blocks of {BLOCK_SIZE} tokens for 1,000 tokens"
    )
