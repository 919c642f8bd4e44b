"""Models with states from the model to the ledger: tokens of `generate` with the scheduler's own rules for their blocks."""

import random
from pathlib import Path
from typing import Any

import pytest

from quire import LLM, SamplingParams
from tests.support.worker.generated import greedy, reference_model
from tests.worker.families.tiny_checkpoints import state_checkpoint

NUM_TOKENS, BLOCK_SIZE = 24, 16
_QUICK = ("falcon_h1",)
MODELS = ("lfm2", "falcon_h1", "qwen3_next", "jamba", "nemotron_h", "granitemoehybrid", "kimi_linear")


class Model:
    """A checkpoint, prompts that begin alike, and what transformers makes of them."""

    def __init__(self, model_type: str, folder: Path) -> None:
        self.path = state_checkpoint(model_type, folder / "model")
        rng = random.Random(3)
        shared = [rng.randrange(256) for _ in range(70)]
        self.prompts = [
            shared[: rng.choice((0, 33, 48, 64, 70))] + [rng.randrange(256) for _ in range(rng.randint(1, 50))]
            for _ in range(12)
        ]
        reference = reference_model(self.path)
        self.expected = [greedy(reference, prompt, NUM_TOKENS).token_ids for prompt in self.prompts]


@pytest.fixture(
    scope="module", params=[name if name in _QUICK else pytest.param(name, marks=pytest.mark.long) for name in MODELS]
)
def model(request, tmp_path_factory) -> Model:
    return Model(request.param, tmp_path_factory.mktemp("states"))


def num_state_blocks(model: Model) -> int:
    with LLM(model.path, block_size=BLOCK_SIZE, max_model_len=160) as llm:
        return llm._backend.limits.num_state_blocks  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("policy", "sets", "tight"),
    [
        ("quire", {}, False),
        ("quire", {"preemption_mode": "swap", "restraint": None}, True),
        ("quire", {"restraint": None}, True),
        ("vllm-v1", {}, True),
        ("chitu", {}, False),
    ],
)
def test_tokens_are_those_of_generate(
    model: Model, policy: str, sets: dict[str, Any], tight: bool, record_property
) -> None:
    """With prefixes cached in the first run, small steps, and in a tight pool preemption by recompute and by swap."""
    # Room for three sequences: prompts start that cannot all grow to their ends.
    num_blocks = 3 * (num_state_blocks(model) + 8) + 1 if tight else 12 * (num_state_blocks(model) + 12)
    sizes = {
        "max_model_len": 160,
        "max_num_batched_tokens": 160 if policy == "chitu" else 48,
        "num_gpu_blocks_override": num_blocks,
    }
    params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
    prompts = [{"prompt_token_ids": prompt} for prompt in model.prompts]
    with LLM(
        model.path,
        block_size=BLOCK_SIZE,
        policy=policy,
        policy_set=sets,
        checkpoint_tokens=32,
        swap_space="16MiB",
        **sizes,
    ) as llm:
        cached = 0
        for _ in range(2):
            found = llm.generate(prompts, params, use_tqdm=False)
            assert [list(made.outputs[0].token_ids) for made in found] == model.expected
            cached = sum(made.num_cached_tokens or 0 for made in found)
        core = llm._backend._core  # type: ignore[attr-defined]
        num_preemptions = core.state.shared.num_cumulative_preemptions
        counts = core.pool_report().gpu
        assert counts.free == counts.total
    assert tight or cached or policy == "chitu"  # which caches no prefixes
    record_property("size", f"{policy}: {cached} cached tokens in the second run, {num_preemptions} preemptions")
