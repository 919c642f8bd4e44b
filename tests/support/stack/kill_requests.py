"""Requests of all kinds that go on and on while workers die under them: each gives the same output every time."""

import threading
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

from quire import SamplingParams
from quire.client.messages import RequestOptions
from quire.client.outputs import Logprob, RequestOutput
from quire.client.sampling_params import BeamSearchParams, StructuredOutputsParams
from quire.client.sync_client import Client
from tests.support.stack.supervised import Case, Readings

SCHEMA = {"type": "array", "items": {"enum": ["north", "south", "east", "west"]}, "minItems": 6, "maxItems": 8}


@dataclass(frozen=True, slots=True)
class ChoiceRead:
    """What is compared of a choice. `logprobs`: None = not asked for."""

    token_ids: list[int]
    logprobs: list[dict[int, Logprob]] | None
    text: str
    finish_reason: str | None
    stop_reason: str | int | None


Output = list[ChoiceRead]
"""By choice."""


def cases() -> dict[str, Case]:
    """Greedy, drawn with penalties, two choices, beams, a schema, log probabilities, and a prompt of many chunks."""
    long = {"max_tokens": 60, "ignore_eos": True}
    return {
        "greedy": Case("class Node:", SamplingParams(temperature=0, **long)),
        "penalties": Case(
            "import ",
            SamplingParams(seed=5, repetition_penalty=1.2, presence_penalty=0.4, frequency_penalty=0.3, **long),
        ),
        "two": Case("def main():", SamplingParams(temperature=1.0, top_p=0.9, seed=6, n=2, **long)),
        "beams": Case(
            "for i in range(", BeamSearchParams(beam_width=4, max_tokens=24, ignore_eos=True).sampling_params()
        ),
        "schema": Case(
            "directions = ",
            SamplingParams(
                temperature=0.8, seed=7, structured_outputs=StructuredOutputsParams(json=SCHEMA), max_tokens=80
            ),
        ),
        "logprobs": Case("try:\n", SamplingParams(temperature=0.7, seed=8, logprobs=3, **long)),
        "long prompt": Case(
            "x = [1, 2, 3]\n" * 20,
            SamplingParams(temperature=0, max_tokens=20, ignore_eos=True),
            RequestOptions(no_cache_reuse=True),
        ),
    }


def output_of(output: RequestOutput) -> Output:
    """What is compared."""
    return [ChoiceRead(list(c.token_ids), c.logprobs, c.text, c.finish_reason, c.stop_reason) for c in output.outputs]


def difference(found: Output, wanted: Output, logprob_tolerance: float) -> str:
    """Where they differ, but for log probabilities that are no further apart than the tolerance; empty: nowhere."""
    rounded = [_rounded(*pair, logprob_tolerance) for pair in zip(found, wanted, strict=True)]
    pairs = [
        (field, getattr(own, field), getattr(theirs, field))
        for own, theirs in zip(rounded, wanted, strict=True)
        for field in ChoiceRead.__dataclass_fields__
    ]
    return "; ".join(f"{field} {own}, not {theirs}" for field, own, theirs in pairs if own != theirs)


def _rounded(found: ChoiceRead, wanted: ChoiceRead, tolerance: float) -> ChoiceRead:
    """`found` with the log probabilities of `wanted` where they are as close as that."""
    pairs = zip(found.logprobs or [], wanted.logprobs or [], strict=False)
    rounded = [
        {token: _closer(value, theirs.get(token), tolerance) for token, value in own.items()} for own, theirs in pairs
    ]
    return replace(found, logprobs=rounded) if found.logprobs else found


def _closer(found: Logprob, wanted: Logprob | None, tolerance: float) -> Logprob:
    is_close = wanted is not None and abs(found.logprob - wanted.logprob) <= tolerance
    return replace(found, logprob=wanted.logprob) if wanted is not None and is_close else found


def undisturbed(address: str, wanted: Mapping[str, Case]) -> dict[str, Output]:
    """All at once; those with a schema end by themselves."""
    with Client(address) as client, ThreadPoolExecutor(len(wanted)) as threads:
        outputs = threads.map(lambda case: client.generate(case.prompt, case.params, timeout_s=120), wanted.values())
        found = dict(zip(wanted, outputs, strict=True))
    assert found["schema"].outputs[0].finish_reason == "stop", "the schema's output is to be a whole one"
    return {name: output_of(output) for name, output in found.items()}


def repeat(
    address: str,
    wanted: Mapping[str, Case],
    expected: Mapping[str, Output],
    meanwhile: Callable[[Readings], None],
    *,
    logprob_tolerance: float = 0.0,
) -> tuple[int, int]:
    """Reads all at the same time, again and again until `meanwhile` is over: how many requests and tokens came.

    `logprob_tolerance`: of models whose last bits depend on the batch.

    AssertionError where a token is lost, repeated or another one; what ended a stream with an error.
    """
    readings, over = Readings(), threading.Event()

    def go_on(client: Client, name: str) -> int:
        count = 0
        while not (over.is_set() and count):
            found = output_of(readings.follow(client, wanted[name]))
            assert not (other := difference(found, expected[name], logprob_tolerance)), f"{name}: {other}"
            count += 1
        return count

    with Client(address) as client, ThreadPoolExecutor(len(wanted)) as threads:
        readings.futures = [threads.submit(go_on, client, name) for name in wanted]
        try:
            meanwhile(readings)
        finally:
            over.set()
        return sum(future.result() for future in readings.futures), readings.num_tokens
