"""Requests of all shapes at once: greedy, sampled in many ways, two samples, beams, some that leave; and what each must give."""

import random
import threading
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from quire import LLM, SamplingParams
from quire.client.messages import RequestOptions
from quire.client.outputs import RequestOutput
from quire.client.sampling_params import BeamSearchParams
from quire.client.structured_outputs import StructuredOutputsParams
from quire.client.sync_client import Client
from svc_common.errors import Cancelled
from tests.support.stack import oracle
from tests.support.stack.sizes import SMALL_STEP

KINDS = ("greedy", "drawn", "two", "beams", "cancelled", "withdrawn")
LEAVERS = ("cancelled", "withdrawn")
SCHEMA = {"type": "array", "items": {"enum": ["north", "south", "east", "west"]}, "minItems": 2, "maxItems": 6}
SAMPLINGS: tuple[Mapping[str, Any], ...] = (
    {"ignore_eos": True},
    {"ignore_eos": True, "repetition_penalty": 1.3, "presence_penalty": 0.5, "frequency_penalty": 0.4},
    {"ignore_eos": True, "logit_bias": {100: 6.0, 200: 5.0, 11: -100.0}, "top_k": 20},
    {"min_p": 0.08, "top_p": 0.9, "min_tokens": 4, "bad_words": ["self"]},
    {"structured_outputs": StructuredOutputsParams(json=SCHEMA)},
)
"""What samples are drawn with, beside temperature 1 and a seed."""
_PAUSE_S = 0.25

Outputs = dict[int, list[list[int]]]


@dataclass(frozen=True, slots=True)
class Ask:
    """One request. `max_tokens` of output, whatever tokens come but for some `sampling`, an index into SAMPLINGS."""

    number: int
    kind: str
    prompt: tuple[int, ...]
    max_tokens: int
    priority: int
    sampling: int

    @property
    def request_id(self) -> str:
        """Its name in the step log."""
        return f"ask-{self.number}"

    @property
    def leaves(self) -> bool:
        """Whether it is cancelled by its client."""
        return self.kind in LEAVERS

    @property
    def params(self) -> SamplingParams:
        """Of its kind; the seed is its number."""
        if self.kind == "beams":
            return BeamSearchParams(beam_width=4, max_tokens=self.max_tokens, ignore_eos=True).sampling_params()
        if self.kind not in ("drawn", "two"):
            return SamplingParams(temperature=0.0, max_tokens=self.max_tokens, ignore_eos=True)
        num_choices = 2 if self.kind == "two" else 1
        options = SAMPLINGS[self.sampling]
        return SamplingParams(n=num_choices, temperature=1.0, seed=self.number, max_tokens=self.max_tokens, **options)


def asks(count: int, seed: int = 0) -> list[Ask]:
    """Prompts of 3 to 100 tokens, some with a common beginning, some that repeat themselves; outputs of 8 to 24, or to be cut."""
    draw = random.Random(seed)
    shared = tuple(draw.randrange(4000) for _ in range(40))
    found = []
    for i in range(count):
        own = tuple(draw.randrange(4000) for _ in range(draw.choice((3, 17, 40, 100))))
        prompt = shared + own[:20] if i % 4 == 3 else own[:4] * 8 if i % 7 == 5 else own
        kind, sampling = KINDS[i % len(KINDS)], (i // len(KINDS) + 3 * (i % len(KINDS) == 2)) % len(SAMPLINGS)
        num_tokens = draw.choice((8, 16, 24))
        max_tokens = 80 if kind in LEAVERS else num_tokens
        found.append(Ask(i, kind, prompt, max_tokens, draw.choice((0, 0, 1, 5)), sampling))
    return found


def run(address: str, wanted: list[Ask], *, at_once: bool = True) -> Outputs:
    """Tokens of the choices of each that stayed, all at once or one after the other. The others were Cancelled, or got all tokens
    before that."""
    with Client(address) as client, ThreadPoolExecutor(len(wanted) if at_once else 1) as threads:
        results = list(threads.map(lambda ask: _one(client, ask), wanted))
    return {ask.number: tokens for ask, tokens in zip(wanted, results, strict=True) if tokens is not None}


def _one(client: Client, ask: Ask) -> list[list[int]] | None:
    options = RequestOptions(priority=ask.priority)
    common = {"options": options, "request_id": ask.request_id, "timeout_s": 240}
    if not ask.leaves:
        return tokens_of(client.generate(list(ask.prompt), ask.params, **common))
    withdraw = threading.Thread(target=_withdraw, args=(client, ask, is_over := threading.Event()))
    if ask.kind == "withdrawn":
        withdraw.start()
    num_tokens = 0
    try:
        for delta in client.generate_stream(list(ask.prompt), ask.params, **common):
            num_tokens += len(delta.token_ids)
            client.cancel(ask.request_id)
    except Cancelled:
        return None
    finally:
        is_over.set()
        if withdraw.ident is not None:
            withdraw.join()
    # On a busy machine all of its tokens may be there before its client has read the first.
    assert num_tokens == ask.max_tokens, f"{ask.request_id} was not cancelled"
    return None


def _withdraw(client: Client, ask: Ask, is_over: threading.Event) -> None:
    """Cancels it wherever it stands, until it is gone."""
    while not is_over.wait(_PAUSE_S):
        client.cancel(ask.request_id)


def tokens_of(output: RequestOutput) -> list[list[int]]:
    """Of each choice."""
    return [list(choice.token_ids) for choice in output.outputs]


@cache
def undisturbed(model: Path, count: int) -> Outputs:
    """Each alone in a pool with room: greedy and beams by `transformers.generate`, drawn ones by a run of their own."""
    found = {}
    with LLM(model, dtype="float32", kv_cache_memory="64MiB", max_num_batched_tokens=SMALL_STEP) as llm:
        for ask in (ask for ask in asks(count) if not ask.leaves):
            job = oracle.Job(ask.prompt, ask.max_tokens)
            if ask.kind == "greedy":
                found[ask.number] = [oracle.expected(model, job).token_ids]
            elif ask.kind == "beams":
                found[ask.number] = oracle.beams(model, job)
            else:
                [output] = llm.generate([list(ask.prompt)], ask.params, use_tqdm=False)
                found[ask.number] = tokens_of(output)
    return found
