"""Text model of a served model, made from its bundle: tokenizer, chat template, generation defaults.

No weights, no torch. Pure and synchronous: used by the gateway and in process by `quire.LLM`. Main methods:

    model = TextModel.from_bundle(data)
    model.encode(text) -> list[int]                  includes special tokens that the tokenizer adds by itself
    model.decode(ids) -> str                         omits special tokens
    model.apply_chat_template(messages) -> str       messages: [{"role": ..., "content": ...}]; writes all special tokens itself
    model.word_sequences(word), model.compiled_grammar(kind, text)      for bad words and structured output
"""

import functools
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import tokenizers
from google.protobuf.message import DecodeError
from numpy.typing import NDArray
from tokenizers import models as tokenizer_models

from gateway_svc.checks.grammars import GrammarChecker
from gateway_svc.text.chat_template import ChatTemplate
from gateway_svc.text.detokenizer import ByteLevelDetokenizer, Detokenizer, WindowDetokenizer
from protos.common.v1 import common_pb2
from protos.worker.v1 import worker_pb2
from svc_common.errors import FailedPrecondition, InvalidArgument

MAX_CACHED_WORDS = 1024
"""Words in the tokenizer's cache: the first ones seen, each of up to 255 bytes, so at most 8 MiB.

The library's default of 10,000 lets distinct texts take 81 MiB, and saves 5 % of the time on source code.
"""


class TextModel:
    """Tokenizer and templates of one model; immutable, safe to share.

    `chat_template`: its source, empty = none; `tool_use_template`: for requests with tools, empty = the same
    template. `special_tokens`: texts by name, such as `eos_token`.
    """

    def __init__(
        self,
        tokenizer: tokenizers.Tokenizer,
        *,
        limits: common_pb2.ModelLimits | None = None,
        chat_template: str = "",
        tool_use_template: str = "",
        special_tokens: Mapping[str, str] | None = None,
        generation_config: Mapping[str, Any] | None = None,
    ) -> None:
        tokenizer.no_truncation()
        tokenizer.no_padding()
        _bound_cache(tokenizer)
        self._tokenizer = tokenizer
        self.limits = limits or common_pb2.ModelLimits()
        self.generation_config = dict(generation_config or {})
        self.chat_template = chat_template
        self.special_tokens = dict(special_tokens or {})
        self._tool_use_template = tool_use_template
        sources = {source for source in (chat_template, tool_use_template) if source}
        self._templates = {source: _loaded(source, special_tokens or {}) for source in sources}
        added = tokenizer.get_added_tokens_decoder()
        self._special_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        self._is_byte_level = _is_byte_level(tokenizer)
        self._bytes: dict[int, bytes] = {}

    @classmethod
    def from_bundle(cls, data: bytes) -> "TextModel":
        """Make the model from a serialised quire.worker.v1.ModelBundle. Raises InvalidArgument if it is invalid."""
        try:
            bundle = worker_pb2.ModelBundle.FromString(data)
            tokenizer = tokenizers.Tokenizer.from_str(bundle.tokenizer_json.decode())
            config = json.loads(bundle.generation_config_json or "{}")
        except DecodeError as error:
            raise InvalidArgument.field("bundle", "is no serialised ModelBundle") from error
        except Exception as error:  # tokenizers raises plain Exception
            raise InvalidArgument.field("bundle", f"has a tokenizer or generation config of no use: {error}") from error
        return cls(
            tokenizer,
            limits=bundle.limits,
            chat_template=bundle.chat_template,
            tool_use_template=bundle.tool_use_template,
            special_tokens=bundle.special_tokens,
            generation_config=config,
        )

    # --- text to tokens ----------------------------------------------------------------------------------------------

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of `text`."""
        return self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids

    def least_tokens(self, text: str) -> int:
        """Cheap lower bound of `len(encode(text))`; 0 if none is known."""
        if not self._is_byte_level or self._tokenizer.normalizer is not None:
            return 0
        return len(text.encode()) // self._longest_token_bytes

    @functools.cached_property
    def _longest_token_bytes(self) -> int:
        return max((len(_bytes_of(token)) for token in self._tokenizer.get_vocab()), default=1)

    @property
    def has_chat_template(self) -> bool:
        """True if the model can answer conversations."""
        return any(isinstance(template, ChatTemplate) for template in self._templates.values())

    def template_for(self, *, has_tools: bool) -> str:
        """Source of the chat template with or without tools, chosen as in transformers; empty = none."""
        return (self._tool_use_template if has_tools else "") or self.chat_template

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """Render the prompt of a conversation; see ChatTemplate.render.

        Raises InvalidArgument if the model has no template or the template refuses.
        """
        template = self._templates.get(self.template_for(has_tools=tools is not None))
        if isinstance(template, FailedPrecondition):
            raise template
        if template is None:
            raise InvalidArgument.field("messages", "this model has no chat template; send a plain prompt instead")
        return template.render(
            messages,
            tools=tools,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            variables=variables,
        )

    def word_sequences(self, word: str) -> list[list[int]]:
        """Token sequences of `word` in text: at the start of a text, and after a space."""
        bare = word.strip()
        sequences = [self.encode(text, add_special_tokens=False) for text in (bare, f" {bare}")]
        return [ids for i, ids in enumerate(sequences) if ids and ids not in sequences[:i]]

    def compiled_grammar(self, kind: common_pb2.GrammarKind, text: str) -> common_pb2.Grammar:
        """Return the grammar in the worker's form. Raises InvalidArgument if it does not compile.

        May take a second, so call it off the event loop.
        """
        return self._grammars.check(kind, text)

    def first_tokens(self, grammar: common_pb2.Grammar) -> NDArray[np.bool_]:
        """Tokens that an output of the grammar may begin with; see FirstTokens."""
        return self._grammars.first_tokens(grammar)

    def check_schema(self, text: str, place: str) -> None:
        """Raise InvalidArgument naming `place` if a JSON schema does not compile. Call it off the event loop."""
        self._grammars.check_at(place, common_pb2.GRAMMAR_KIND_JSON_SCHEMA, text)

    def made_grammar(self, text: str, place: str) -> common_pb2.Grammar:
        """Compile a Lark grammar that the gateway built from the field `place`. Call it off the event loop.

        Raises InvalidArgument naming `place` if it is too complex.
        """
        return self._grammars.check_made(place, text)

    @functools.cached_property
    def _grammars(self) -> GrammarChecker:
        tokenizer_json = self._tokenizer.to_str().encode()
        return GrammarChecker(tokenizer_json, self.limits.eos_token_ids, self.limits.vocab_size)

    # --- tokens to text ----------------------------------------------------------------------------------------------

    def decode(self, token_ids: Sequence[int], *, special_tokens: bool = False) -> str:
        """Text of `token_ids`, without unknown and, by default, special tokens. Incomplete UTF-8 becomes U+FFFD."""
        return self._tokenizer.decode(list(token_ids), skip_special_tokens=not special_tokens)

    def detokenizer(self, *, special_tokens: bool = False) -> Detokenizer:
        """Make an incremental decoder for one token stream. `special_tokens`: their names appear in the text."""
        if self._is_byte_level:
            return ByteLevelDetokenizer(self.token_bytes if special_tokens else self._text_bytes)
        return WindowDetokenizer(functools.partial(self.decode, special_tokens=special_tokens))

    def special_ids(self, texts: Iterable[str]) -> dict[int, str]:
        """Those of `texts` that are special tokens, by id; such tokens have no text in ordinary output."""
        ids = {self._tokenizer.token_to_id(text): text for text in texts}
        return {token_id: text for token_id, text in ids.items() if token_id in self._special_ids}

    def token_bytes(self, token_id: int) -> bytes:
        """Bytes of a token, with special tokens by name; empty for unknown ids."""
        token = self._tokenizer.id_to_token(token_id)
        if token is None:
            return b""
        return _bytes_of(token) if self._is_byte_level else token.encode()

    def names(self, token_ids: Iterable[int]) -> list[str]:
        """Tokens as in the vocabulary: byte-level ones have "Ġ" for a space. Empty for unknown ids."""
        return [self._tokenizer.id_to_token(token_id) or "" for token_id in token_ids]

    def char_starts(self, token_ids: Sequence[int], *, special_tokens: bool = False) -> list[int]:
        """For each token, the index in the whole text of the first character that it is part of."""
        detokenizer, size = self.detokenizer(special_tokens=special_tokens), 0
        starts: list[int] = []
        segments = [detokenizer.push(token_id) for token_id in token_ids]
        for segment in [*segments, detokenizer.flush()]:
            if segment is not None:
                starts.extend(size + start for start in segment.starts)
                size += len(segment.text)
        return starts

    def _text_bytes(self, token_id: int) -> bytes:
        known = self._bytes.get(token_id)
        if known is None:
            known = b"" if token_id in self._special_ids else self.token_bytes(token_id)
            self._bytes[token_id] = known
        return known


def _loaded(source: str, special_tokens: Mapping[str, str]) -> ChatTemplate | FailedPrecondition:
    """Load the template, or return the error if it is invalid."""
    try:
        return ChatTemplate(source, special_tokens)
    except FailedPrecondition as error:
        return error


def _bound_cache(tokenizer: tokenizers.Tokenizer) -> None:
    """Limit the tokenizer's cache to MAX_CACHED_WORDS; models other than BPE and Unigram have no cache."""
    model = tokenizer.model
    if isinstance(model, tokenizer_models.BPE | tokenizer_models.Unigram):
        model._resize_cache(MAX_CACHED_WORDS)  # the library offers no other way to set it


def _is_byte_level(tokenizer: tokenizers.Tokenizer) -> bool:
    """True if the decoder is byte-level BPE only; the library shows its parts only in serialised form."""
    decoder = json.loads(tokenizer.decoder.__getstate__()) if tokenizer.decoder is not None else {}
    parts = decoder.get("decoders", [decoder])
    return [part.get("type") for part in parts] == ["ByteLevel"]


def _byte_of_char() -> dict[str, int]:
    """GPT-2's alphabet: printable bytes map to themselves, others to characters from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    return {chr(b): b for b in printable} | {chr(0x100 + i): b for i, b in enumerate(others)}


_BYTE_OF_CHAR = _byte_of_char()


def _bytes_of(token: str) -> bytes:
    """Bytes of a byte-level token; an added token with other characters maps to its own UTF-8."""
    values = [_BYTE_OF_CHAR.get(char) for char in token]
    return token.encode() if None in values else bytes(value for value in values if value is not None)
