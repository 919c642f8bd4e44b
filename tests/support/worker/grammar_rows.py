"""Rows that draw tokens under `GrammarMasks` without a model: random logits, the built-in model's tokenizer."""

import functools
import json
import random
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import tokenizers
from numpy.typing import NDArray

from protos.common.v1 import common_pb2
from svc_common.grammars import CHOICE, JSON_SCHEMA, LARK, REGEX
from worker_svc.sampling.grammar_masks import GrammarMasks
from worker_svc.sampling.token_masks import MaskAsk, num_words

TINY = Path(__file__).resolve().parents[3] / "models" / "tiny"
VOCAB_SIZE = 4096
EOS_IDS = (0, 1)


def json_schema(schema: object) -> common_pb2.Grammar:
    """As the gateway sends it."""
    return common_pb2.Grammar(kind=JSON_SCHEMA, text=json.dumps(schema, separators=(",", ":"), ensure_ascii=False))


def regex(text: str) -> common_pb2.Grammar:
    return common_pb2.Grammar(kind=REGEX, text=text)


def choice(*texts: str) -> common_pb2.Grammar:
    return common_pb2.Grammar(kind=CHOICE, text=json.dumps(texts))


def lark(text: str) -> common_pb2.Grammar:
    return common_pb2.Grammar(kind=LARK, text=text)


def new_masks(*, vocab_size: int = VOCAB_SIZE, eos_ids: Sequence[int] = EOS_IDS) -> GrammarMasks:
    """Those of a worker with models/tiny."""
    return GrammarMasks((TINY / "tokenizer.json").read_bytes(), eos_ids, vocab_size)


@functools.cache
def tokenizer() -> tokenizers.Tokenizer:
    """The library's own reading of the same tokenizer: the witness of what tokens stand for."""
    return tokenizers.Tokenizer.from_file(str(TINY / "tokenizer.json"))


def text_of(token_ids: Sequence[int]) -> str:
    """Special tokens left out."""
    return tokenizer().decode(list(token_ids), skip_special_tokens=True)


def ids_of(text: str) -> list[int]:
    return tokenizer().encode(text, add_special_tokens=False).ids


def allowed(
    masks: GrammarMasks, row: int, draft_ids: Sequence[int] = (), *, vocab_size: int = VOCAB_SIZE
) -> list[set[int]]:
    """The ids that each mask of the row allows."""
    lines = np.full((len(draft_ids) + 1, num_words(vocab_size)), 0x5A5A5A5A, np.int32)
    masks.fill([MaskAsk(row, draft_ids, 0)], lines)
    return [ids_in(line, vocab_size) for line in lines]


def ids_in(line: NDArray[np.int32], vocab_size: int = VOCAB_SIZE) -> set[int]:
    """The ids whose bits are set."""
    bits = np.unpackbits(line.view(np.uint8), bitorder="little")[:vocab_size]
    return set(np.flatnonzero(bits).tolist())


def draw(masks: GrammarMasks, row: int, rng: random.Random) -> int:
    """One token of those allowed, each equally likely; the row commits it."""
    (ids,) = allowed(masks, row)
    assert ids, "a grammar that can go on allows something"
    token_id = rng.choice(sorted(ids))
    masks.accept(row, [token_id])
    return token_id


def finish(masks: GrammarMasks, row: int, rng: random.Random, max_tokens: int = 2000) -> list[int]:
    """Draws until an end-of-sequence token (which is not returned) or `max_tokens`."""
    drawn: list[int] = []
    while len(drawn) < max_tokens:
        token_id = draw(masks, row, rng)
        if token_id in EOS_IDS:
            return drawn
        drawn.append(token_id)
    raise AssertionError(f"not at its end after {max_tokens} tokens: {text_of(drawn)[:200]}")
