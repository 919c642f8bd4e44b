"""Guesses on repetitive prompts through the services: the same streams in fewer steps."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest

from quire import SamplingParams
from quire.client.sync_client import Client
from quire.local_stack.stack import LocalStack
from tests.support.stack.commands import steps

NUM_REQUESTS = 12
LONG = {"max_tokens": 80, "ignore_eos": True}


def prompt_of(number: int) -> list[int]:
    """A few tokens again and again."""
    return [100 + number + i for i in range(3 + number % 4)] * 12


def params_of(number: int) -> SamplingParams:
    """Greedy, drawn, and two samples in turn."""
    if number % 3 == 0:
        return SamplingParams(temperature=0, **LONG)
    return SamplingParams(n=number % 3, temperature=0.3, seed=number, **LONG)


def run(num_guesses: int) -> tuple[list[list[list[int]]], int, int]:
    """Tokens of all choices, how many steps it took, and how many guesses were right."""
    sets = (f"num_spec_tokens={num_guesses}",)
    with (
        LocalStack(policy_set=sets, worker_args=("--dtype", "float32")) as stack,
        Client(stack.grpc_address) as client,
        ThreadPoolExecutor(3) as threads,
    ):

        def ask(number: int) -> list[list[int]]:
            output = client.generate(prompt_of(number), params_of(number), timeout_s=120)
            return [list(choice.token_ids) for choice in output.outputs]

        found = list(threads.map(ask, range(NUM_REQUESTS)))
        log = steps(stack.admin_address)
    num_right = sum(len(tokens) - 1 for step in log for tokens in step["sampled"].values() if tokens)
    return found, len(log), num_right


@pytest.mark.long
def test_repetitive_prompts(record_property: Callable[[str, object], None]) -> None:
    """R150, R151: identical streams; steps of the batch are saved, and more of each sequence's own."""
    plain, num_plain, none = run(0)
    guessed, num_guessed, num_right = run(4)
    assert guessed == plain and none == 0
    num_tokens = sum(len(tokens) for choices in plain for tokens in choices)
    assert num_guessed < num_plain and num_right > 0.1 * num_tokens
    record_property(
        "size",
        f"drafts through the services: {NUM_REQUESTS} repetitive prompts, {num_guessed} steps instead of {num_plain}, "
        f"{num_right} of {num_tokens} tokens were guessed right, all are the same",
    )
