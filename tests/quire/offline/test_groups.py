"""Groups in process with a real model: beams are those of `generate(num_beams=...)`, samples those of each sequence alone."""

import itertools
import random
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from quire import LLM, SamplingParams
from quire.client.sampling_params import BeamSearchParams
from tests.support.stack.sizes import SMALL_STEP
from tests.support.worker.generated import BeamRule, beams

MODEL = Path("models/tiny")
TOKENS = 10
SCORE_TOLERANCE = 1e-4
RULES = list(itertools.product((1.0, 0.0, 2.0), (False, True, "never")))


@pytest.fixture(scope="module")
def reference() -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32).eval()


@pytest.fixture(scope="module", params=["quire", "vllm-v0"])
def llm(request: pytest.FixtureRequest) -> Iterator[LLM]:
    with LLM(
        MODEL, dtype="float32", policy=request.param, max_model_len=256, max_num_batched_tokens=SMALL_STEP
    ) as made:
        yield made


def check_beams(llm: LLM, reference: PreTrainedModel, seeds: range, rules: list[tuple[float, bool | str]]) -> int:
    num_checked = 0
    for seed in seeds:
        rng = random.Random(seed)
        prompt = [rng.randrange(5, 600) for _ in range(rng.randint(3, 20))]
        for penalty, early in rules:
            params = BeamSearchParams(beam_width=4, max_tokens=TOKENS, length_penalty=penalty, early_stopping=early)
            [output] = llm.beam_search([prompt], params, use_tqdm=False)
            ends = tuple(reference.generation_config.eos_token_id)
            expected = beams(reference, prompt, BeamRule(penalty, early, ends, TOKENS))
            assert [o.token_ids for o in output.outputs] == [made.token_ids for made in expected], (
                seed,
                penalty,
                early,
            )
            scores = [made.score for made in expected]
            assert [o.score for o in output.outputs] == pytest.approx(scores, abs=SCORE_TOLERANCE)
            num_checked += 1
    return num_checked


def test_beams_are_those_of_generate(llm: LLM, reference: PreTrainedModel) -> None:
    """R21, R25, R94: the same hypotheses in the same order with the same scores, by every rule of ending."""
    assert check_beams(llm, reference, range(1), RULES[::4]) == 3


@pytest.mark.long
def test_many_beams_are_those_of_generate(llm: LLM, reference: PreTrainedModel) -> None:
    """R21, R25, R94: the same for more prompts and all rules."""
    assert check_beams(llm, reference, range(100, 106), RULES) == 6 * len(RULES)


def test_samples_are_those_of_a_smaller_group(llm: LLM) -> None:
    """R25: the sample of index i is the same whatever n is, and best_of gives the likeliest of them, best first."""
    prompt = list(range(40, 60))
    params = {"max_tokens": 8, "seed": 5, "temperature": 1.0, "logprobs": 0}
    [four] = llm.generate([prompt], SamplingParams(n=4, **params), use_tqdm=False)
    [two] = llm.generate([prompt], SamplingParams(n=2, **params), use_tqdm=False)
    assert [o.token_ids for o in two.outputs] == [o.token_ids for o in four.outputs[:2]]
    [best] = llm.generate([prompt], SamplingParams(n=2, best_of=4, **params), use_tqdm=False)
    ranked = sorted(four.outputs, key=lambda o: -(o.cumulative_logprob or 0.0))
    assert [o.token_ids for o in best.outputs] == [o.token_ids for o in ranked[:2]]
