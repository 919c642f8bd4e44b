"""The same prompt twice: the second prefill computes only what was not cached (R134).

Seen three times over: in the usage, in the step log, and in the worker's own count of computed tokens. Of a model with states,
it computes what follows the last checkpoint; a sample here, every family in `make test-long`.
"""

import random
from collections.abc import Callable
from pathlib import Path

import pytest

from quire import SamplingParams
from quire.client.messages import RequestOptions
from quire.client.sync_client import Client
from quire.local_stack.stack import LocalStack
from tests.support.checkpoints import SAMPLE_STATE_FAMILIES, STATE_FAMILIES
from tests.support.stack.commands import steps
from tests.support.stack.oracle import Job, expected
from tests.support.worker.driver import limits_of
from tests.worker.families.tiny_checkpoints import state_checkpoint

BLOCK = 16
LENGTH, SHARED, MAX_MODEL_LEN = 2000, 1500, 2048


def _prefill(stack: LocalStack, request_id: str) -> tuple[int, int, int]:
    """(computed before, tokens scheduled, tokens the worker says it computed) of the request's prefill, which ran alone."""
    mine = [s for s in steps(stack.admin_address) if any(g["id"] == request_id for g in s["scheduled"])]
    prefill = [s for s in mine if s["scheduled"][0]["prefill"]]
    assert all(len(s["scheduled"]) == 1 for s in mine)
    first = prefill[0]["scheduled"][0]
    tokens = sum(s["scheduled"][0]["tokens"] for s in prefill)
    return first["computed_before"], tokens, sum(s["computed_tokens"] for s in prefill)


def test_second_time_only_the_rest_is_computed(stack: LocalStack, client: Client) -> None:
    """100 tokens: six blocks of 16 are cached, 4 tokens are left."""
    prompt = [random.Random(7).randrange(4000) for _ in range(100)]
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    first = client.generate(prompt, params, request_id="prefix-first")
    second = client.generate(prompt, params, request_id="prefix-second")
    assert second.outputs[0].token_ids == first.outputs[0].token_ids
    assert (first.num_cached_tokens, second.num_cached_tokens) == (0, 96)
    assert _prefill(stack, "prefix-first") == (0, 100, 100)
    assert _prefill(stack, "prefix-second") == (96, 4, 4)


def test_another_salt_computes_everything(client: Client) -> None:
    """Only equal salts share cached blocks."""
    prompt = [random.Random(8).randrange(4000) for _ in range(64)]
    params = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True)
    cached = [
        client.generate(prompt, params, options=RequestOptions(cache_salt=salt)).num_cached_tokens
        for salt in ("a", "a", "b")
    ]
    assert cached == [0, 48, 0]


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "family", [f if f in SAMPLE_STATE_FAMILIES else pytest.param(f, marks=pytest.mark.long) for f in STATE_FAMILIES]
)
def test_a_prefix_of_a_model_with_states_ends_at_a_checkpoint(
    family: str, tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    """A prompt of 2,000 tokens that comes again computes at most the distance of two checkpoints, and one that begins with 1,500 of
    them no more than that beside its own tokens; tokens are those of `generate`."""
    path = state_checkpoint(family, tmp_path / family, max_position_embeddings=2 * LENGTH)
    limits = limits_of(path)
    # Where states are small, a distance that differs from the block size by more than a few.
    distance = max(limits.checkpoint_tokens, 16 * BLOCK)
    num_blocks = 2 * (MAX_MODEL_LEN // BLOCK + limits.num_state_blocks * (2 + LENGTH // distance))
    draw = random.Random(9)
    first = [draw.randrange(256) for _ in range(LENGTH)]
    second = [*first[:SHARED], *(draw.randrange(256) for _ in range(LENGTH - SHARED))]
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    args = {"--checkpoint-tokens": distance, "--num-gpu-blocks-override": num_blocks, "--max-model-len": MAX_MODEL_LEN}
    worker_args = ("--dtype", "float32", *(str(word) for pair in args.items() for word in pair))
    cached = {}
    with (
        LocalStack(model=path, worker_args=worker_args, max_num_batched_tokens=512) as running,
        Client(running.grpc_address) as client,
    ):
        for name, prompt in {"first": first, "again": first, "continued": second}.items():
            output = client.generate(prompt, params, request_id=name, timeout_s=120)
            assert output.outputs[0].token_ids == expected(path, Job(tuple(prompt), 8)).token_ids
            cached[name] = output.num_cached_tokens
            assert _prefill(running, name) == (cached[name], LENGTH - cached[name], LENGTH - cached[name])
    at_end = (LENGTH - 1) // BLOCK * BLOCK
    assert cached == {"first": 0, "again": at_end, "continued": SHARED // distance * distance}
    assert LENGTH - at_end <= distance
    record_property("size", f"{family}, checkpoints each {distance} tokens: {cached} of {LENGTH} cached")
