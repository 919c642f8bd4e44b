"""Draft tokens of models with states: tokens are the same as without, some drafts are accepted and some rejected."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from quire import LLM, SamplingParams
from svc_common.errors import ConfigError
from tests.support.checkpoints import make_checkpoint
from tests.support.mtp_checkpoints import make_qwen3_next
from tests.worker.families.tiny_checkpoints import state_checkpoint

_QUICK, _LONG = (("lfm2", "swap"),), [pytest.mark.long]
MODELS = ("lfm2", "jamba", "qwen3_next", "nemotron_h")
BLOCK_SIZE, NUM_DRAFTS, NUM_TOKENS = 16, 3, 40
_PART = [7, 8, 9, 10, 11, 12]
_ALLOWED = [7, 8, 9]
"""Of few tokens, n-grams find some that are right."""
PROMPTS = [_PART * 8, [*_PART * 6, 1, 2], list(range(30, 60)), [*_PART * 6, *range(90, 110)], [5], [*_PART * 8, 3]]
RECOMPUTE: tuple[str, dict[str, Any]] = ("quire", {"restraint": None, "preemption_mode": "recompute"})
SWAP: tuple[str, dict[str, Any]] = ("quire", {"restraint": None, "preemption_mode": "swap"})
VLLM: tuple[str, dict[str, Any]] = ("vllm-v1-async", {})
POLICIES = {"recompute": RECOMPUTE, "swap": SWAP, "vllm-v1-async": VLLM}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("states")


def checkpoint(folder: Path, model_type: str) -> Path:
    """Made on first use."""
    path = folder / model_type
    return path if path.exists() else state_checkpoint(model_type, path)


def params() -> list[SamplingParams]:
    """Greedy, drawn, and several samples of a prompt."""
    return [
        SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True, allowed_token_ids=_ALLOWED),
        SamplingParams(temperature=0.8, seed=3, max_tokens=NUM_TOKENS, ignore_eos=True, allowed_token_ids=_ALLOWED),
        SamplingParams(
            temperature=0.8, seed=4, n=2, max_tokens=NUM_TOKENS, ignore_eos=True, allowed_token_ids=_ALLOWED
        ),
    ]


def run(
    model: Path, num_drafts: int, policy: tuple[str, Mapping[str, Any]], *, num_sequences: int = 3, **settings: Any
) -> tuple[list[list[int]], list[dict[str, Any]]]:
    """Tokens of all samples, and the steps. So many sequences can start that not all fit at their ends."""
    sizes = {"max_model_len": 160, "max_num_batched_tokens": 40, "block_size": BLOCK_SIZE, "checkpoint_tokens": 32}
    with LLM(model, **sizes) as llm:
        num_states = llm._backend.limits.num_state_blocks  # type: ignore[attr-defined]
    name, sets = policy
    with LLM(
        model,
        dtype="float32",
        policy=name,
        policy_set={"num_spec_tokens": num_drafts, **sets},
        num_gpu_blocks_override=num_sequences * (num_states + 4) + 1,
        swap_space="16MiB",
        log_steps=True,
        **sizes,
        **settings,
    ) as llm:
        found = [
            list(sample.token_ids)
            for each in params()
            for output in llm.generate(PROMPTS, each, use_tqdm=False)
            for sample in output.outputs
        ]
        counts = llm._backend._core.pool_report().gpu  # type: ignore[attr-defined]
        assert counts.free == counts.total
        return found, llm.steps()


def verified(steps: list[dict[str, Any]]) -> tuple[int, int]:
    """Draft tokens that were accepted and rejected."""
    accepted = rejected = 0
    for step in steps:
        for entry in step["scheduled"]:
            drawn = [tokens for name in entry["seqs"] if (tokens := step["sampled"].get(name))]
            if drawn and not entry["prefill"]:
                accepted += sum(map(len, drawn)) - len(drawn)
                rejected += entry["tokens"] - sum(map(len, drawn))
    return accepted, rejected


@pytest.mark.parametrize(
    ("model_type", "policy"),
    [
        pytest.param(model_type, policy, id=f"{model_type} {name}", marks=[] if (model_type, name) in _QUICK else _LONG)
        for model_type in MODELS
        for name, policy in POLICIES.items()
    ],
)
def test_tokens_are_the_same(
    model_type: str,
    policy: tuple[str, dict[str, Any]],
    folder: Path,
    record_property: Callable[[str, object], None],
) -> None:
    """In chunks, with preemption, prefix hits at checkpoints, and samples of one prompt; greedy and drawn."""
    model = checkpoint(folder, model_type)
    plain, _ = run(model, 0, policy)
    found, steps = run(model, NUM_DRAFTS, policy)
    assert found == plain
    accepted, rejected = verified(steps)
    preempted = [how for step in steps for _, how in step["preempted"]]
    assert accepted > 20 and rejected > 20 and preempted and ("swap" in preempted) == (policy is SWAP)
    assert any(entry["computed_before"] and entry["prefill"] for step in steps for entry in step["scheduled"])
    record_property("size", f"{accepted} draft tokens accepted, {rejected} rejected, {len(preempted)} preemptions")


@pytest.mark.parametrize("policy", [SWAP, VLLM], ids=["swap", "vllm-v1-async"])
@pytest.mark.long
def test_an_mtp_head(policy: tuple[str, dict[str, Any]], folder: Path) -> None:
    """Qwen3-Next with a gated delta net and a random head: hidden states are kept beside those of sequences."""
    model = folder / "qwen3-next-mtp"
    if not model.exists():
        make_qwen3_next(model, first="linear_attention")
    plain, _ = run(model, 0, policy)
    found, steps = run(model, NUM_DRAFTS, policy, drafts="mtp")
    assert found == plain
    assert verified(steps)[1] > 200 and any(step["preempted"] for step in steps)


@pytest.mark.long
def test_a_draft_model_with_attention(folder: Path) -> None:
    """Of another class; its keys and values are in the same blocks, beside the states of the model."""
    model = checkpoint(folder, "lfm2")
    plain, _ = run(model, 0, SWAP)
    found, steps = run(model, NUM_DRAFTS, SWAP, draft_model=make_checkpoint("llama", folder / "llama"))
    assert found == plain
    assert verified(steps)[1] > 200 and any(step["preempted"] for step in steps)


def test_a_draft_model_with_states_is_refused(folder: Path) -> None:
    """It takes in its own proposals. The error names the option, its layers, and what to use instead."""
    model = checkpoint(folder, "lfm2")
    with pytest.raises(ConfigError, match=r"draft_model.* has layers with states of sequences \(Lfm2ShortConv\)"):
        run(model, NUM_DRAFTS, SWAP, draft_model=model)
