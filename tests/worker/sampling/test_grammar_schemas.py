"""Random JSON schemas (bounded strings, arrays, depth) without a model: whatever is drawn under their masks validates."""

import json
import random
from typing import Any

import jsonschema
import pytest

from svc_common.grammars import GrammarCompiler
from tests.support.worker.grammar_rows import (
    EOS_IDS,
    TINY,
    VOCAB_SIZE,
    allowed,
    draw,
    finish,
    ids_of,
    json_schema,
    new_masks,
    text_of,
)
from tests.support.worker.random_schemas import random_schema
from worker_svc.sampling.grammar_masks import GrammarMasks

COUNTS = pytest.mark.parametrize("count", [60, pytest.param(200, marks=pytest.mark.long)])


@pytest.fixture(scope="module")
def masks() -> GrammarMasks:
    return new_masks()


@COUNTS
def test_ended_outputs_validate(masks: GrammarMasks, count: int, record_property: Any) -> None:
    """Random schemas: each output that ends by an end-of-sequence token is JSON that the schema accepts."""
    total = 0
    for i in range(count):
        schema = random_schema(random.Random(i))
        masks.add(0, json_schema(schema), [])
        token_ids = finish(masks, 0, random.Random(i))
        masks.remove(0)
        jsonschema.validate(json.loads(text_of(token_ids)), schema)
        total += len(token_ids)
    record_property("size", f"grammars: {count} random schemas, {total} tokens, all ended and valid")


@COUNTS
def test_cut_outputs_are_prefixes_that_can_be_completed(masks: GrammarMasks, count: int, record_property: Any) -> None:
    """Cut at a random length, an output is a prefix that the grammar takes; a row rebuilt from it ends in a valid whole."""
    compiler = GrammarCompiler((TINY / "tokenizer.json").read_bytes(), EOS_IDS, VOCAB_SIZE)
    for i in range(count):
        rng, schema = random.Random(i), random_schema(random.Random(i))
        masks.add(0, json_schema(schema), [])
        prefix = _cut(masks, rng)
        masks.remove(0)
        assert compiler.compile(json_schema(schema)).validate_tokens(prefix) == len(prefix)
        masks.add(1, json_schema(schema), prefix)
        rest = finish(masks, 1, rng)
        masks.remove(1)
        jsonschema.validate(json.loads(text_of(prefix + rest)), schema)
    record_property("size", f"grammars: {count} random schemas cut, rebuilt and completed")


def _cut(masks: GrammarMasks, rng: random.Random) -> list[int]:
    drawn: list[int] = []
    for _ in range(rng.randrange(1, 30)):
        token_id = draw(masks, 0, rng)
        if token_id in EOS_IDS:
            break
        drawn.append(token_id)
    return drawn


def test_the_witness_can_say_no(masks: GrammarMasks) -> None:
    """Without masks the schemas refuse what the tests above accept: drawn outputs of one schema under most of the others."""
    texts, schemas = [], [random_schema(random.Random(i)) for i in range(30)]
    for i, schema in enumerate(schemas):
        masks.add(0, json_schema(schema), [])
        texts.append(text_of(finish(masks, 0, random.Random(i))))
        masks.remove(0)
    refused = sum(
        not jsonschema.Draft202012Validator(schema).is_valid(json.loads(text))
        for i, schema in enumerate(schemas)
        for j, text in enumerate(texts)
        if i != j
    )
    assert refused > 0.9 * 30 * 29


def test_valid_documents_are_accepted(masks: GrammarMasks) -> None:
    """The masks are no narrower than the schema: documents as people write them, compact and indented, are let through."""
    schema = {
        "type": "object",
        "properties": {"a": {"type": "array", "items": {"type": "integer"}}, "é": {"type": "string"}},
        "required": ["a"],
    }
    for document in ({"a": []}, {"a": [1, -20], "é": '日本 "x"'}, {"a": [3], "extra": {"b": None}}):
        for indent in (None, 2, 4):
            token_ids = ids_of(json.dumps(document, indent=indent, ensure_ascii=False))
            masks.add(0, json_schema(schema), [])
            lines = allowed(masks, 0, token_ids)
            assert all(token_id in line for token_id, line in zip(token_ids, lines, strict=False))
            assert set(EOS_IDS) <= lines[-1]
            masks.remove(0)
