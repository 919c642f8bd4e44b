"""The same prompt twice: the second prefill computes only what was not cached (R134).

Seen three times over: in the usage, in the step log, and in the worker's own count of computed tokens.
"""

import random

from quire import SamplingParams
from quire.client.messages import RequestOptions
from quire.client.sync_client import Client
from quire.local_stack.stack import LocalStack
from tests.support.stack.commands import steps

BLOCK = 16


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
