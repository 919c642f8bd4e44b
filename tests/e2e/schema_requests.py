"""Requests whose outputs must match random JSON schemas, asked for all at once; and what outputs have to be."""

import json
import random
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import jsonschema

from quire import SamplingParams, StructuredOutputsParams
from quire.client.outputs import CompletionOutput
from quire.client.sync_client import Client
from svc_common.grammars import GrammarCompiler
from tests.support.worker.grammar_rows import EOS_IDS, TINY, VOCAB_SIZE, json_schema
from tests.support.worker.random_schemas import random_schema

MAX_AT_ONCE = 32
_MAX_TOKENS = 160
_FEW_TOKENS = 6


@dataclass(frozen=True, slots=True)
class Ask:
    """One request for `n` outputs of a schema. Every fourth is greedy; every 50th has room for a beginning only."""

    number: int
    schema: dict[str, Any]

    @property
    def n(self) -> int:
        """Every tenth has several."""
        return 3 if self.number % 10 == 9 else 1

    @property
    def prompt(self) -> str:
        """Of a few blocks, the first of which are shared by all."""
        return "Here is the document that you asked for, in the form that you asked for. " + "It is: " * (
            self.number % 7
        )

    @property
    def params(self) -> SamplingParams:
        """The seed is its number."""
        return SamplingParams(
            n=self.n,
            temperature=0.0 if self.number % 4 == 0 else 0.8,
            seed=self.number,
            max_tokens=_FEW_TOKENS if self.number % 50 == 5 else _MAX_TOKENS,
            structured_outputs=StructuredOutputsParams(json=self.schema),
        )


def asks(count: int) -> list[Ask]:
    """The first `count` of the random schemas."""
    return [Ask(i, random_schema(random.Random(i))) for i in range(count)]


Outputs = dict[int, list[CompletionOutput]]


def run(address: str, wanted: list[Ask]) -> Outputs:
    """All of them, up to 32 at a time; outputs by number."""
    with Client(address) as client, ThreadPoolExecutor(MAX_AT_ONCE) as threads:
        results = threads.map(lambda ask: client.generate(ask.prompt, ask.params, timeout_s=240).outputs, wanted)
        return {ask.number: list(outputs) for ask, outputs in zip(wanted, results, strict=True)}


def tokens(outputs: Outputs) -> dict[int, list[list[int]]]:
    """Of every choice."""
    return {number: [list(choice.token_ids) for choice in choices] for number, choices in outputs.items()}


def check(wanted: list[Ask], outputs: Outputs) -> Counter[str]:
    """Whole outputs validate, cut ones are beginnings that the grammar takes; how many ended which way."""
    compiler = GrammarCompiler((TINY / "tokenizer.json").read_bytes(), EOS_IDS, VOCAB_SIZE)
    counts: Counter[str] = Counter()
    for ask in wanted:
        assert len(outputs[ask.number]) == ask.n
        for choice in outputs[ask.number]:
            counts[str(choice.finish_reason)] += 1
            _check_one(compiler, ask, choice)
    return counts


def _check_one(compiler: GrammarCompiler, ask: Ask, choice: CompletionOutput) -> None:
    if choice.finish_reason == "stop":
        jsonschema.validate(json.loads(choice.text), ask.schema)
        assert choice.stop_reason in EOS_IDS
        return
    assert choice.finish_reason == "length" and len(choice.token_ids) == ask.params.max_tokens
    assert not set(choice.token_ids) & set(EOS_IDS)
    matcher = compiler.compile(json_schema(ask.schema))
    assert matcher.validate_tokens(choice.token_ids) == len(choice.token_ids), f"schema {ask.number}: {choice.text}"
