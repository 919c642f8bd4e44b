"""Drafts of draft models and MTP heads: tokens are the same as without. A draft model that is the model itself is always right."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from quire import LLM, SamplingParams
from svc_common.errors import ConfigError
from tests.support.checkpoints import make_checkpoint
from tests.support.mtp_checkpoints import make_mtp_checkpoint
from worker_svc.settings import WorkerSettings

SHARED = [(7 * i) % 250 for i in range(40)]
PROMPTS = [SHARED, [*SHARED[:32], 9, 8, 7], list(range(30, 80)), [*SHARED[:33], 1], [5], SHARED[:20]]
NUM_BLOCKS = 13
"""Too few for all prompts: some are preempted."""
RECOMPUTE: tuple[str, dict[str, Any]] = ("quire", {"restraint": None, "preemption_mode": "recompute"})
SWAP: tuple[str, dict[str, Any]] = ("quire", {"restraint": None, "preemption_mode": "swap"})
VLLM: tuple[str, dict[str, Any]] = ("vllm-v1-async", {})


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One for all checkpoints of these tests."""
    return tmp_path_factory.mktemp("checkpoints")


@pytest.fixture(scope="module")
def llama(folder: Path) -> Path:
    return make_checkpoint("llama", folder / "llama")


def params(max_tokens: int) -> list[SamplingParams]:
    """Greedy, then drawn."""
    return [
        SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True),
        SamplingParams(temperature=0.9, top_p=0.95, seed=3, max_tokens=max_tokens, ignore_eos=True),
    ]


def run(
    model: Path,
    num_drafts: int,
    policy: tuple[str, Mapping[str, Any]] = RECOMPUTE,
    *,
    max_tokens: int = 32,
    blocks: int = NUM_BLOCKS,
    **settings: Any,
) -> tuple[list[list[int]], list[dict[str, Any]]]:
    """Tokens of all choices, and the steps."""
    name, sets = policy
    with LLM(
        model,
        dtype="float32",
        policy=name,
        policy_set={"num_spec_tokens": num_drafts, **sets},
        max_model_len=192,
        num_gpu_blocks_override=blocks,
        max_num_batched_tokens=24,
        log_steps=True,
        **settings,
    ) as llm:
        found = [
            list(output.outputs[0].token_ids)
            for each in params(max_tokens)
            for output in llm.generate(PROMPTS, each, use_tqdm=False)
        ]
        return found, llm.steps()


def accepted(steps: list[dict[str, Any]]) -> tuple[int, int]:
    """Draft tokens that were right, and all."""
    right = asked = 0
    for step in steps:
        for entry in step["scheduled"]:
            [name] = entry["seqs"]
            if not entry["prefill"] and step["sampled"].get(name):
                right += len(step["sampled"][name]) - 1
                asked += entry["tokens"] - 1
    return right, asked


@pytest.mark.parametrize("policy", [RECOMPUTE, SWAP, VLLM], ids=["recompute", "swap", "vllm-v1-async"])
def test_the_model_itself_is_always_right(
    policy: tuple[str, dict[str, Any]], llama: Path, record_property: Callable[[str, object], None]
) -> None:
    """Its keys and values are those of all tokens: after prefix hits, chunks, preemption and swaps; greedy and drawn."""
    plain, _ = run(llama, 0, policy)
    found, steps = run(llama, 3, policy, draft_model=llama)
    assert found == plain
    right, asked = accepted(steps)
    assert right == asked > 200
    preempted = [how for step in steps for _, how in step["preempted"]]
    assert preempted and ("swap" in preempted) == (policy is SWAP)
    assert any(entry["computed_before"] and entry["prefill"] for step in steps for entry in step["scheduled"])
    record_property("size", f"{right} of {asked} draft tokens right, {len(preempted)} preemptions ({policy[0]})")


def test_another_model_changes_nothing(folder: Path, llama: Path) -> None:
    """A random draft model of other sizes, which is hardly ever right."""
    other = make_checkpoint("qwen3", folder / "qwen3", seed=5)
    found, steps = run(llama, 3, SWAP, draft_model=other)
    assert found == run(llama, 0, SWAP)[0]
    right, asked = accepted(steps)
    assert right < 0.2 * asked


def test_windowed_layers_of_the_model(folder: Path, llama: Path) -> None:
    """Of several cache groups, drafts use the blocks of the layers that attend to all tokens."""
    model = make_checkpoint("gemma2", folder / "gemma2")
    found, steps = run(model, 3, blocks=40, draft_model=llama)
    assert found == run(model, 0, blocks=40)[0]
    assert accepted(steps)[1] > 200


@pytest.mark.parametrize("family", [pytest.param("deepseek_v3", marks=pytest.mark.long), "glm4_moe"])
@pytest.mark.parametrize("policy", [SWAP, pytest.param(VLLM, marks=pytest.mark.long)], ids=["swap", "vllm-v1-async"])
def test_tokens_are_the_same_with_an_mtp_head(family: str, policy: tuple[str, dict[str, Any]], folder: Path) -> None:
    """A random head, in chunks, with preemption and prefix hits; greedy and drawn."""
    model = make_mtp_checkpoint(family, folder / f"{family}-mtp")
    found, steps = run(model, 3, policy, drafts="mtp")
    assert found == run(model, 0, policy)[0]
    assert accepted(steps)[1] > 200


def test_what_does_not_go_together_is_refused(folder: Path, llama: Path) -> None:
    """Errors name the option, what is wrong, and what to do."""
    larger = make_checkpoint("llama", folder / "larger", vocab_size=600)
    mistral = make_checkpoint("mistral", folder / "mistral")
    short = make_checkpoint("llama", folder / "short", max_position_embeddings=64)
    for model, settings, said in (
        (
            llama,
            {"draft_model": larger},
            "draft_model .* has a vocabulary of 600 tokens, and the model one of 512: use",
        ),
        (mistral, {"draft_model": llama}, "keeps only blocks of its last 24 tokens, and drafts need more; use drafts"),
        (llama, {"draft_model": short}, "draft_model: max_model_len=192 is more than the 64 positions"),
        (llama, {"draft_model": folder / "none"}, "draft_model: .*none does not exist"),
        (llama, {"drafts": "mtp"}, "drafts mtp: .* has no MTP head that is known"),
        (llama, {"drafts": "model"}, "drafts: model needs draft_model"),
        (llama, {"drafts": "ngram", "draft_model": llama}, "drafts: ngram excludes draft_model"),
    ):
        with pytest.raises(ConfigError, match=said):
            run(model, 3, **settings)


def test_ranks_have_no_draft_model(llama: Path) -> None:
    """Before anything is loaded."""
    for drafts in ({"draft_model": llama}, {"drafts": "mtp"}):
        with pytest.raises(ConfigError, match="--drafts: a worker of 2 ranks has no draft model and no MTP head"):
            WorkerSettings.of(model=llama, tensor_parallel=2, **drafts)
