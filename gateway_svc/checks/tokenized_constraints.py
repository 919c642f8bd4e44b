"""Parts of a request that need the model's tokenizer besides its prompt: bad words and grammars. Pure."""

import json
from collections.abc import Sequence
from typing import Protocol

from gateway_svc.checks.first_token import FirstTokens
from protos.common.v1 import common_pb2
from protos.inference.v1 import inference_pb2 as pb
from svc_common import wire_arrays

_GRAMMAR_KINDS = {
    "json_schema": common_pb2.GRAMMAR_KIND_JSON_SCHEMA,
    "regex": common_pb2.GRAMMAR_KIND_REGEX,
    "choice": common_pb2.GRAMMAR_KIND_CHOICE,
    "lark": common_pb2.GRAMMAR_KIND_LARK,
}


class Wording(FirstTokens, Protocol):
    """Interface needed of the model's tokenizer besides encoding the prompt (`text_model.TextModel`)."""

    def word_sequences(self, word: str) -> list[list[int]]:
        """Token sequences that a word may have in text."""

    def compiled_grammar(self, kind: common_pb2.GrammarKind, text: str) -> common_pb2.Grammar:
        """Return the grammar, known to compile; raises InvalidArgument otherwise."""


def bad_word_sequences(words: Sequence[str], wording: Wording) -> list[common_pb2.TokenSequence]:
    """Token sequences of all words, without duplicates."""
    found = {tuple(ids): None for word in words for ids in wording.word_sequences(word) if ids}
    return [common_pb2.TokenSequence(token_ids=wire_arrays.pack(ids)) for ids in found]


def compiled_grammar(request: pb.GenerateRequest | pb.ChatRequest, wording: Wording) -> common_pb2.Grammar | None:
    """Compile the request's structured output; None = unconstrained. Raises InvalidArgument if it does not compile."""
    kind = request.WhichOneof("structured_output")
    if kind is None:
        return None
    text = json.dumps(list(request.choice.choices), ensure_ascii=False) if kind == "choice" else getattr(request, kind)
    return wording.compiled_grammar(_GRAMMAR_KINDS[kind], text)
