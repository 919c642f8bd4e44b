"""Requests of all shapes at once: greedy, sampled, two samples, beams, some cancelled, with priorities; and what each must give."""

import random
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from quire import LLM, SamplingParams
from quire.client import Client
from quire.messages import RequestOptions
from quire.outputs import RequestOutput
from quire.sampling_params import BeamSearchParams
from svc_common.errors import Cancelled
from tests.e2e import oracle

KINDS = ("greedy", "drawn", "two", "beams", "cancelled")


@dataclass(frozen=True, slots=True)
class Ask:
    """One request. `max_tokens` of output, whatever tokens come."""

    number: int
    kind: str
    prompt: tuple[int, ...]
    max_tokens: int
    priority: int

    @property
    def params(self) -> SamplingParams:
        """Of its kind; the seed is its number."""
        if self.kind == "beams":
            return BeamSearchParams(beam_width=4, max_tokens=self.max_tokens, ignore_eos=True).sampling_params()
        drawn = self.kind in ("drawn", "two")
        return SamplingParams(
            n=2 if self.kind == "two" else 1,
            temperature=1.0 if drawn else 0.0,
            seed=self.number,
            max_tokens=self.max_tokens,
            ignore_eos=True,
        )


def asks(count: int, seed: int = 0) -> list[Ask]:
    """Prompts of 3 to 100 tokens, some with a common beginning; outputs of 8 to 24."""
    draw = random.Random(seed)
    shared = tuple(draw.randrange(4000) for _ in range(40))
    found = []
    for i in range(count):
        own = tuple(draw.randrange(4000) for _ in range(draw.choice((3, 17, 40, 100))))
        prompt = shared + own[:20] if i % 4 == 3 else own
        found.append(Ask(i, KINDS[i % len(KINDS)], prompt, draw.choice((8, 16, 24)), draw.choice((0, 0, 1, 5))))
    return found


def run(address: str, wanted: list[Ask]) -> dict[int, list[list[int]]]:
    """All at once; tokens of the choices of each that was not cancelled."""
    with Client(address) as client, ThreadPoolExecutor(len(wanted)) as threads:
        results = list(threads.map(lambda ask: _one(client, ask), wanted))
    return {ask.number: tokens for ask, tokens in zip(wanted, results, strict=True) if tokens is not None}


def _one(client: Client, ask: Ask) -> list[list[int]] | None:
    options = RequestOptions(priority=ask.priority)
    if ask.kind != "cancelled":
        return _tokens(client.generate(list(ask.prompt), ask.params, options=options, timeout_s=240))
    name = f"cancelled-{ask.number}"
    stream = client.generate_stream(list(ask.prompt), ask.params, options=options, request_id=name, timeout_s=240)
    try:
        for _ in stream:
            client.cancel(name)
    except Cancelled:
        pass
    return None


def _tokens(output: RequestOutput) -> list[list[int]]:
    return [list(choice.token_ids) for choice in output.outputs]


@cache
def undisturbed(model: Path, count: int) -> dict[int, list[list[int]]]:
    """Each alone in a pool with room: greedy and beams by `transformers.generate`, drawn ones by a run of their own."""
    found = {}
    with LLM(model, dtype="float32", kv_cache_memory="64MiB") as llm:
        for ask in asks(count):
            if ask.kind == "greedy":
                job = oracle.Job(ask.prompt, ask.max_tokens)
                found[ask.number] = [oracle.expected(model, job).token_ids]
            elif ask.kind == "beams":
                found[ask.number] = oracle.beams(model, oracle.Job(ask.prompt, ask.max_tokens))
            elif ask.kind != "cancelled":
                [output] = llm.generate([list(ask.prompt)], ask.params, use_tqdm=False)
                found[ask.number] = _tokens(output)
    return found
