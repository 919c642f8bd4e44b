"""Speculation through the scheduler: the worker guesses, verifies by drawing again, and the streams are the same in fewer steps."""

from collections.abc import Callable

import pytest

from quire import LLM, SamplingParams
from quire.client.sampling_params import StructuredOutputsParams
from tests.support.stack.sizes import SMALL_STEP

PROMPTS = [[10, 11, 12, 13] * 8, list(range(30, 60)), "def f(x):\n    return x\n" * 4]
PARAMS = [
    SamplingParams(temperature=0, max_tokens=24, ignore_eos=True),
    SamplingParams(temperature=0.8, seed=4, max_tokens=16, ignore_eos=True, presence_penalty=0.5, min_tokens=3),
    SamplingParams(n=2, temperature=1.0, seed=5, top_p=0.9, max_tokens=10, logprobs=0),
    SamplingParams(temperature=0, max_tokens=20, structured_outputs=StructuredOutputsParams(regex="(ab|cd){8}")),
]


def run(policy: str, num_guesses: int) -> tuple[list[list[list[int]]], int]:
    """Tokens of all choices, and how many steps it took."""
    sets = {"num_spec_tokens": num_guesses}
    with LLM(
        dtype="float32",
        policy=policy,
        policy_set=sets,
        max_model_len=192,
        num_gpu_blocks_override=40,
        max_num_batched_tokens=SMALL_STEP,
    ) as llm:
        found = [
            [list(choice.token_ids) for choice in output.outputs]
            for params in PARAMS
            for output in llm.generate(PROMPTS, params, use_tqdm=False)
        ]
        return found, llm._backend._core.step


@pytest.mark.parametrize("policy", ["quire", pytest.param("vllm-v1-async", marks=pytest.mark.long)])
def test_streams_are_the_same_in_fewer_steps(policy: str, record_property: Callable[[str, object], None]) -> None:
    """R150, R151: greedy, drawn with penalties, two samples, a grammar; guesses that hold save steps."""
    plain, num_plain = run(policy, 0)
    guessed, num_guessed = run(policy, 4)
    assert guessed == plain
    assert num_guessed < 0.9 * num_plain
    record_property("size", f"drafts under {policy}: {num_guessed} steps instead of {num_plain}, the same tokens")
