"""Load of the growth benchmark: requests of all kinds, one after the other on each of several clients.

This module defines and sends the requests; benchmarks.growth does the measuring.
"""

import asyncio
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from quire.client.messages import RequestOptions
from quire.client.sampling_params import BeamSearchParams, SamplingParams
from quire.client.structured_outputs import StructuredOutputsParams
from quire.client.sync_client import AsyncClient
from svc_common.errors import QuireError

_TIMEOUT_S = 120.0
_SCHEMA = {
    "type": "object",
    "properties": {"id": {"type": "integer", "maximum": 999}, "kind": {"enum": ["a", "b"]}},
    "required": ["id", "kind"],
    "additionalProperties": False,
}
_NUM_SCHEMAS = 100
_WORDS = ("import", "class", "return", "def", "self", "yield", "lambda", "except", "print", "range")
KINDS = ("greedy", "drawn", "two", "beams", "schema", "logprobs", "stopped", "cancelled", "refused", "adapter")
ADAPTER = "added"
_MODELS = {"adapter": ADAPTER, "refused": "not-loaded"}


@dataclass(slots=True)
class Load:
    """Sends requests and counts their ends.

    `kinds`: those to send; `on_done(n)`: called after the n-th completed request.
    """

    address: str
    kinds: tuple[str, ...]
    on_done: Callable[[int], None]
    num_sent: int = 0
    num_done: int = 0
    ends: Counter[str] = field(default_factory=Counter)

    async def send(self, count: int, num_clients: int) -> None:
        """Send `count` requests, at most `num_clients` at a time."""
        last = self.num_sent + count
        async with AsyncClient(self.address) as client, asyncio.TaskGroup() as tasks:
            for _ in range(num_clients):
                tasks.create_task(self._one_after_the_other(client, last))

    async def _one_after_the_other(self, client: AsyncClient, last: int) -> None:
        while self.num_sent < last:
            number, self.num_sent = self.num_sent, self.num_sent + 1
            kind = self.kinds[number % len(self.kinds)]
            try:
                await _ask(client, kind, number)
                self.ends[f"{kind}: ended"] += 1
            except QuireError as error:
                self.ends[f"{kind}: {error.status} {error.reason}"] += 1
            self.num_done += 1
            self.on_done(self.num_done)


async def _ask(client: AsyncClient, kind: str, number: int) -> None:
    draw = random.Random(number)
    options = RequestOptions(
        model=_MODELS.get(kind, ""),
        priority=draw.choice((0, 0, 1, 5)),
        labels={"number": str(number)},
    )
    prompt, params = _prompt(draw), _params(draw, kind, number)
    if kind == "cancelled":
        stream = client.generate_stream(prompt, params, options=options, timeout_s=_TIMEOUT_S)
        async for _ in stream:
            stream.cancel()
        return
    await client.generate(prompt, params, options=options, timeout_s=_TIMEOUT_S)


def _prompt(draw: random.Random) -> str:
    """A prompt; a fifth of the prompts share a prefix."""
    words = " ".join(draw.choices(_WORDS, k=draw.randint(1, 12)))
    return f"# a common beginning of many files, with some words in it\n{words}" if draw.random() < 0.2 else words


def _params(draw: random.Random, kind: str, number: int) -> SamplingParams:
    max_tokens = 2 if kind == "short" else draw.choice((4, 8, 16, 24))
    if kind == "beams":
        return BeamSearchParams(beam_width=4, max_tokens=max_tokens).sampling_params()
    schema = {**_SCHEMA, "title": f"schema {number % _NUM_SCHEMAS}"}
    return SamplingParams(
        n=2 if kind == "two" else 1,
        temperature=1.0 if kind in ("drawn", "two", "schema") else 0.0,
        seed=number,
        max_tokens=max_tokens,
        logprobs=5 if kind == "logprobs" else None,
        prompt_logprobs=2 if kind == "logprobs" else None,
        stop=("e", "o ") if kind == "stopped" else (),
        structured_outputs=StructuredOutputsParams(json=schema) if kind == "schema" else None,
    )
