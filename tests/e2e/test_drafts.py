"""Drafts through the services: the same streams in fewer steps, whatever proposes them."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from quire import SamplingParams
from quire.built_in_model import default_model
from quire.client.sync_client import Client
from quire.local_stack.stack import LocalStack
from tests.support.mtp_checkpoints import make_mtp_checkpoint
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


def run_with_cancelled(model: Path, num_drafts: int, *drafts: str) -> tuple[list[list[int]], int]:
    """Tokens of a few requests, of which others are cancelled beside them, and how many steps it took."""
    settings = ("--dtype", "float32", "--max-model-len", "256", "--num-gpu-blocks-override", "24", *drafts)
    with (
        LocalStack(model=model, policy_set=(f"num_spec_tokens={num_drafts}",), worker_args=settings) as stack,
        Client(stack.grpc_address) as client,
        ThreadPoolExecutor(4) as threads,
    ):

        def ask(number: int) -> list[int]:
            params = SamplingParams(temperature=0.8 * (number % 2), seed=number, max_tokens=40, ignore_eos=True)
            prompt = [20 + number, *range(60)]
            with client.generate_stream(prompt, params) as stream:
                next(iter(stream))
            return list(client.generate(prompt, params, timeout_s=120).outputs[0].token_ids)

        found = list(threads.map(ask, range(6)))
        return found, len(steps(stack.admin_address))


@pytest.mark.long
@pytest.mark.parametrize("proposer", ["model", "mtp"])
def test_drafts_of_models(proposer: str, tmp_path: Path) -> None:
    """Three processes, greedy and drawn, with cancelled requests and preemption. The model itself proposes well."""
    model = default_model() if proposer == "model" else make_mtp_checkpoint("deepseek_v3", tmp_path / "model")
    options = ("--draft-model", str(model)) if proposer == "model" else ("--drafts", "mtp")
    plain, num_plain = run_with_cancelled(model, 0)
    drafted, num_drafted = run_with_cancelled(model, 3, *options)
    assert drafted == plain
    assert proposer == "mtp" or num_drafted < 0.6 * num_plain
