"""Structured output through the real engine with models/tiny: schemas, preemption, chunks, drafts, children, beams, failures."""

import json
import random
import re
from collections.abc import Callable
from typing import Any

import jsonschema
import pytest

from protos.worker.v1 import worker_pb2
from svc_common import wire_arrays
from svc_common.grammars import GrammarCompiler
from tests.support.worker.driver import make_engine
from tests.support.worker.grammar_rows import EOS_IDS, TINY, VOCAB_SIZE, choice, json_schema, lark, regex, text_of
from tests.support.worker.random_schemas import random_schema
from tests.worker.sampling.grammar_serving import MAX_ROWS, Serving, Stream
from worker_svc.executor.model_engine import ModelEngine

NUM_BLOCKS = 400
MAX_TOKENS = 480
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "tags": {"type": "array", "items": {"enum": ["a", "b"]}, "maxItems": 3},
    },
    "required": ["name", "tags"],
    "additionalProperties": False,
}
Act = Callable[[Serving, random.Random], None]


@pytest.fixture(scope="module")
def engine() -> ModelEngine:
    return make_engine(TINY, num_blocks=NUM_BLOCKS)


def plain(serving: Serving, _: random.Random) -> None:
    """One token of every stream."""
    serving.step()


def disturbed(serving: Serving, rng: random.Random) -> None:
    """Rows are removed now and then; prompts in chunks; drafts to verify; several decode steps in one message."""
    for stream in list(serving.streams.values()):
        if stream.row is not None and rng.random() < 0.08:
            serving.preempt(stream)
    decoding = all(s.row is not None and s.computed == len(s.known) - 1 for s in serving.streams.values())
    if decoding and rng.random() < 0.4:
        serving.step(num_decode_steps=rng.randrange(2, 5))
    else:
        serving.step(chunk=rng.choice([5, 11, 1000]), num_drafts=rng.randrange(4))


def serve(engine: ModelEngine, grammars: dict[str, Any], act: Act, max_tokens: int = MAX_TOKENS) -> dict[str, Stream]:
    """All streams to their end, up to MAX_ROWS at a time; the seed of each is its place."""
    serving, rng, done = Serving(engine, NUM_BLOCKS), random.Random(0), {}
    waiting = [(name, i) for i, name in enumerate(grammars)]
    while waiting or serving.streams:
        while waiting and len(serving.streams) < MAX_ROWS:
            name, seed = waiting.pop(0)
            serving.start(name, grammars[name], seed=seed)
        act(serving, rng)
        for name, stream in list(serving.streams.items()):
            if stream.ended or stream.flags or len(stream.output) >= max_tokens:
                done[name] = serving.drop(name)
    return done


def check_valid(streams: dict[str, Stream], schemas: dict[str, Any]) -> int:
    """Every ended output validates; how many there are."""
    ended = {name: stream for name, stream in streams.items() if stream.ended}
    for name, stream in ended.items():
        jsonschema.validate(json.loads(text_of(stream.text_ids)), schemas[name])
    return len(ended)


def random_schemas(count: int) -> dict[str, Any]:
    return {f"s{i}": random_schema(random.Random(i)) for i in range(count)}


@pytest.mark.parametrize("count", [24, pytest.param(200, marks=pytest.mark.long)])
def test_random_schemas(engine: ModelEngine, count: int, record_property: Any) -> None:
    """Of 200 random schemas at least 190 end by themselves, all of those validate, whatever is done to the streams meanwhile;

    and preemption, chunks, drafts and several decode steps change no token.
    """
    schemas = random_schemas(count)
    grammars = {name: json_schema(schema) for name, schema in schemas.items()}
    undisturbed = serve(engine, grammars, plain)
    num_ended = check_valid(undisturbed, schemas)
    assert num_ended >= 0.95 * count
    outputs = serve(engine, grammars, disturbed)
    assert {name: s.output for name, s in outputs.items()} == {name: s.output for name, s in undisturbed.items()}
    tokens = sum(len(stream.output) for stream in outputs.values())
    accepted = sum(stream.num_accepted for stream in outputs.values())
    assert accepted > 10
    record_property(
        "size",
        f"grammars with models/tiny: {num_ended} of {count} schemas ended; {tokens} tokens, the same when disturbed "
        f"({accepted} of them guessed)",
    )


@pytest.mark.parametrize("act", [plain, disturbed])
def test_outputs_cut_by_length_are_prefixes(engine: ModelEngine, act: Act, record_property: Any) -> None:
    """The grammar takes all tokens of an output that was cut off."""
    grammars = {name: json_schema(schema) for name, schema in random_schemas(20).items()}
    outputs = serve(engine, grammars, act, max_tokens=9)
    compiler = GrammarCompiler((TINY / "tokenizer.json").read_bytes(), EOS_IDS, VOCAB_SIZE)
    cut = {name: stream for name, stream in outputs.items() if not stream.ended}
    assert len(cut) > 8 and all(len(stream.output) >= 9 for stream in cut.values())
    for name, stream in cut.items():
        assert compiler.compile(grammars[name]).validate_tokens(stream.output) == len(stream.output)
    record_property(
        "size", f"grammars with models/tiny: {len(cut)} of {len(outputs)} outputs cut by length, all prefixes"
    )


@pytest.mark.parametrize("act", [plain, disturbed])
def test_kinds_in_one_batch(engine: ModelEngine, act: Act) -> None:
    """Regular expressions, choices, Lark and schemas side by side, each to its own."""
    pattern = r"[A-Z][a-z]{2,8} [0-9]{1,3}"
    grammars = {
        "regex": regex(pattern),
        "choice": choice("north", "south", "nowhere", "日本語"),
        "lark": lark('start: word | "[" inner "]"\ninner: word | "[" word "]"\nword: "<" /[a-z]{1,5}/ ">"'),
        "schema": json_schema(SCHEMA),
    }
    outputs = serve(engine, grammars, act)
    texts = {name: text_of(stream.text_ids) for name, stream in outputs.items()}
    assert all(stream.ended for stream in outputs.values())
    assert re.fullmatch(pattern, texts["regex"])
    assert texts["choice"] in {"north", "south", "nowhere", "日本語"}
    assert re.fullmatch(r"\[*<[a-z]{1,5}>\]*", texts["lark"])
    jsonschema.validate(json.loads(texts["schema"]), SCHEMA)


def test_later_decode_steps_know_the_tokens_of_earlier_ones(engine: ModelEngine) -> None:
    """R148: sampling waits for the tokens that its masks depend on, within one message too; 16 steps in one give those of 16."""
    grammar = json_schema({"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 200})
    one_by_one, at_once = Serving(engine, NUM_BLOCKS), None
    first = one_by_one.start("a", grammar, seed=4)
    for _ in range(17):
        one_by_one.step()
    at_once = Serving(engine, NUM_BLOCKS)
    second = at_once.start("a", grammar, seed=4)
    at_once.step()
    at_once.step(num_decode_steps=16)
    assert len(second.output) == 17 and second.output == first.output
    assert re.fullmatch(r"\[[\s\d,]*", text_of(second.output))


def test_children_begin_and_go_on_by_the_grammar(engine: ModelEngine) -> None:
    """n = 4: each sibling's first token is one that the grammar allows, and each output matches as a whole."""
    serving = Serving(engine, NUM_BLOCKS)
    pattern = r"[a-z]{3,9}-[0-9]{2}"
    serving.start("p", regex(pattern), seed=3, num_children=4)
    done: dict[str, str] = {}
    while not done or serving.streams:
        serving.step()
        for name, stream in list(serving.streams.items()):
            if stream.ended:
                done[name] = text_of(serving.drop(name).text_ids)
    assert done.keys() == {"p", "p.1", "p.2", "p.3"}
    assert all(re.fullmatch(pattern, text) for text in done.values()) and len(set(done.values())) > 1


def test_beams_have_candidates_of_the_grammar(engine: ModelEngine) -> None:
    """Every candidate of a beam goes on to a match, also after a step that it was told rather than drew; fewer than asked where the
    grammar leaves fewer."""
    serving = Serving(engine, NUM_BLOCKS)
    compiler = GrammarCompiler((TINY / "tokenizer.json").read_bytes(), EOS_IDS, VOCAB_SIZE)
    grammar = regex("(yes|no)!{1,9}")
    beam = serving.start("beam", grammar, num_candidates=4)
    seen = set()
    for _ in range(6):
        outputs = serving.step()
        (count,) = wire_arrays.unpack(outputs.candidates.counts, "counts").tolist()
        ids = wire_arrays.unpack(outputs.candidates.token_ids, "token_ids").tolist()
        assert 1 <= count == len(ids) <= 4
        matcher = compiler.compile(grammar)
        assert matcher.consume_tokens(beam.output) or not beam.output
        for token_id in ids:
            assert matcher.validate_tokens([token_id]) == 1 or (token_id in EOS_IDS and matcher.is_accepting())
        going_on = [token_id for token_id in ids if token_id not in EOS_IDS]
        if not going_on:
            break
        seen.add(count)
        beam.told = going_on[-1:]
    assert len(beam.output) >= 2


@pytest.mark.parametrize("act", [plain, disturbed])
def test_a_bad_grammar_fails_alone(engine: ModelEngine, act: Act) -> None:
    """Its row gets ROW_FLAG_GRAMMAR and no token; the others' tokens are those of a run without it."""
    good = {f"s{i}": json_schema(random_schema(random.Random(i))) for i in range(4)}
    alone = serve(engine, good, plain)
    outputs = serve(engine, good | {"bad": regex("[a-")}, act)
    assert outputs["bad"].flags == worker_pb2.ROW_FLAG_GRAMMAR and not outputs["bad"].output
    assert {name: outputs[name].output for name in good} == {name: alone[name].output for name in good}


def test_a_grammar_too_complex_in_the_middle_fails_alone(engine: ModelEngine) -> None:
    """The tokens drawn before that stand; the neighbour ends."""
    bad = lark('start: A\nA: (("a"{1,1000}){1,1000}){1,1000}')
    outputs = serve(engine, {"bad": bad, "good": regex("[0-9]{40}")}, plain)
    assert outputs["bad"].flags == worker_pb2.ROW_FLAG_GRAMMAR_LIMIT and outputs["bad"].output
    assert re.fullmatch("[0-9]{40}", text_of(outputs["good"].text_ids))
