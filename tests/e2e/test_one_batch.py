"""One batch of everything through the services: vectors, an adapter, a schema, guesses, beams, plain requests, each as if alone.

In few blocks, so that some are swapped meanwhile.
"""

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from quire import SamplingParams
from quire.client.messages import RequestOptions
from quire.client.sampling_params import BeamSearchParams, PoolingParams, StructuredOutputsParams
from quire.client.sync_client import Client
from quire.local_stack.stack import LocalStack
from quire.operators.admin import AdminClient
from tests.support.stack.commands import steps

LONG = {"max_tokens": 40, "ignore_eos": True}
SCHEMA = {"type": "array", "items": {"enum": ["north", "south", "east", "west"]}, "minItems": 6, "maxItems": 8}
WORDS = [10, 11, 12, 13] * 10


def asks(client: Client) -> dict[str, Callable[[], object]]:
    """What each gives, by its request id."""

    def tokens(name: str, prompt: list[int], params: SamplingParams, model: str = "") -> Callable[[], object]:
        def ask() -> object:
            options = RequestOptions(model=model)
            output = client.generate(prompt, params, options=options, request_id=name, timeout_s=120)
            return [list(choice.token_ids) for choice in output.outputs]

        return ask

    def vector() -> object:
        [output] = client.embed([list(range(300, 420))], PoolingParams(), request_id="vector", timeout_s=120)
        return output.outputs.embedding

    schema = SamplingParams(
        temperature=0.7, seed=3, structured_outputs=StructuredOutputsParams(json=SCHEMA), max_tokens=60
    )
    return {
        "plain": tokens("plain", list(range(60, 90)), SamplingParams(temperature=0, **LONG)),
        "guessed": tokens("guessed", WORDS, SamplingParams(temperature=0, **LONG)),
        "drawn": tokens("drawn", list(range(90, 120)), SamplingParams(n=2, temperature=1.0, seed=8, **LONG)),
        "penalised": tokens(
            "penalised", WORDS[::-1], SamplingParams(seed=9, repetition_penalty=1.3, min_p=0.05, **LONG)
        ),
        "adapted": tokens("adapted", list(range(60, 90)), SamplingParams(temperature=0, **LONG), "one"),
        "schema": tokens("schema", list(range(200, 220)), schema),
        "beams": tokens("beams", list(range(150, 170)), BeamSearchParams(beam_width=4, **LONG).sampling_params()),
        "vector": vector,
    }


def test_everything_at_once(tight: LocalStack, adapters: dict[str, Path]) -> None:
    """R25, R138, R150: no output depends on the other requests in the batch."""
    with Client(tight.grpc_address) as client, AdminClient(tight.admin_address) as admin:
        admin.load_adapter("one", str(adapters["one"]))
        deadline = time.monotonic() + 20
        while "one" not in {card.name for card in client.models()}:
            assert time.monotonic() < deadline, "the gateway was not told of the adapter"
            time.sleep(0.02)
        alone = {name: ask() for name, ask in asks(client).items()}
        with ThreadPoolExecutor(len(alone)) as threads:
            together = dict(zip(alone, threads.map(lambda ask: ask(), asks(client).values()), strict=True))
        log = steps(tight.admin_address)
        admin.unload_adapter("one")
    assert together == alone
    assert alone["plain"] != alone["adapted"]
    # Ids come twice: those of the second round ran side by side.
    assert max(len({group["id"].partition("~")[0] for group in step["scheduled"]}) for step in log) >= 4
