"""Sampling on the whole path: tokens that `LLM` draws with many seeds come as often as transformers' logits say."""

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
import torch

from quire import LLM, SamplingParams
from tests.support.checkpoints import VOCAB_SIZE
from tests.support.worker.driver import on_tests_device
from tests.support.worker.sampled_rows import Options, distribution, likelihood
from tests.worker.engine.families import Families, Family

_NUM_SAMPLES = 64
CASES = {
    "softmax": Options(),
    "temperature": Options(temperature=1.6),
    "top-k, top-p": Options(temperature=2.0, top_k=40, top_p=0.9),
    "min-p, repetition, bias": Options(temperature=2.0, min_p=0.02, repetition=1.4, bias={300: 4.0, 301: -100.0}),
}


@pytest.fixture(scope="module")
def family(families: Families) -> Family:
    return families["qwen2"]


@pytest.fixture(scope="module")
def llm(family: Family) -> Iterator[LLM]:
    with LLM(family.path, dtype="float32", max_model_len=128, **on_tests_device({})) as made:
        yield made


def params_of(options: Options, seed: int) -> SamplingParams:
    """One token in many samples."""
    return SamplingParams(
        n=_NUM_SAMPLES,
        max_tokens=1,
        seed=seed,
        temperature=options.temperature,
        top_k=options.top_k,
        top_p=options.top_p,
        min_p=options.min_p,
        repetition_penalty=options.repetition,
        logit_bias=options.bias or None,
        ignore_eos=True,
    )


def check(case: str, family: Family, llm: LLM, num_seeds: int) -> str:
    """Chi-square at the 99.9 % level; another prompt's logits say something else."""
    options, prompt = CASES[case], list(range(60, 83))
    many = [params_of(options, seed) for seed in range(num_seeds)]
    outputs = llm.generate([prompt] * num_seeds, many, use_tqdm=False)
    drawn = [choice.token_ids[0] for output in outputs for choice in output.outputs]
    assert len(drawn) == num_seeds * _NUM_SAMPLES
    counts = np.bincount(drawn, minlength=VOCAB_SIZE)
    assert likelihood(counts, expected(family, prompt, options)) > 0.001
    with pytest.raises(AssertionError):
        assert likelihood(counts, expected(family, prompt[:-1], options)) > 0.001
    return f"{case}, {len(drawn)} samples of {num_seeds} seeds"


def test_first_tokens_come_as_often_as_the_logits_say(family: Family, llm: LLM, record_property) -> None:
    """Every sample of every seed is one draw from softmax of the model's logits."""
    record_property("size", f"frequencies on the whole path: {check('softmax', family, llm, 16)}")


@pytest.mark.long
@pytest.mark.parametrize("case", CASES)
def test_first_tokens_by_all_options(case: str, family: Family, llm: LLM, record_property) -> None:
    """The same with what options make of the logits."""
    record_property("size", f"frequencies on the whole path: {check(case, family, llm, 50)}")


@torch.inference_mode()
def expected(family: Family, prompt: list[int], options: Options) -> np.ndarray:
    """float64[vocabulary]: chances of the token behind `prompt`."""
    logits = family.reference(torch.tensor([prompt])).logits[0, -1]
    return np.array(distribution(logits.tolist(), replace(options, prompt=prompt)))
