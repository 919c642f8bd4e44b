"""Compile grammars of structured output, for the gateway to refuse bad ones and for the worker to mask tokens.

Both compile the same text with the same limits, so what the gateway accepts compiles at the worker. The
grammar engine is llguidance; all knowledge of the grammar and tokenizer forms that it expects is here. No
rows, no requests, no torch.
"""

import json
import re
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer
from numpy.typing import NDArray

from protos.common.v1 import common_pb2
from svc_common.redaction import redacted

JSON_SCHEMA = common_pb2.GRAMMAR_KIND_JSON_SCHEMA
REGEX = common_pb2.GRAMMAR_KIND_REGEX
CHOICE = common_pb2.GRAMMAR_KIND_CHOICE
LARK = common_pb2.GRAMMAR_KIND_LARK

# Between JSON tokens: nothing, one space, or a newline with indentation. With unbounded whitespace, a model
# in a loop emits blanks until its length limit.
WHITESPACE = r"(\n[ \t]{0,32}|[ ])?"

# Limits per grammar, for any text: about 20 ms and 50 MiB to build it, and 15 ms per mask.
LIMITS = LLParserLimits(
    initial_lexer_fuel=1_000_000,
    step_lexer_fuel=200_000,
    step_max_items=50_000,
    max_items_in_row=2_000,
    max_lexer_states=50_000,
    max_grammar_size=500_000,
    verbose_errors=False,
)

# llguidance recurses along references, without a limit: 10 KiB for each level of a JSON schema, 3 KiB for each rule of
# Lark. The longest chains of 256 KiB of schema (8,000 levels) take 80 MiB; a stack of 8 MiB would end the process.
_STACK_BYTES = 256 * 2**20
_stack_size = threading.Lock()

T = TypeVar("T")


class GrammarError(ValueError):
    """Unusable grammar or tokenizer.

    The message is a clause for people: "is no regular expression that can be used: ...".
    """


class GrammarCompiler:
    """Compiles grammars for the vocabulary of one model. Immutable, may be used from several threads.

    `tokenizer_json`: of the checkpoint; `eos_ids`: the ids that end an output, at least one; `vocab_size`:
    logits per position, which may exceed the tokenizer's size (the rest is never allowed) or be smaller.
    Construction takes about 10 µs per token of the vocabulary. Raises GrammarError if llguidance does not
    support the tokenizer.
    """

    def __init__(self, tokenizer_json: bytes, eos_ids: Sequence[int], vocab_size: int) -> None:
        self._tokenizer = _tokenizer(tokenizer_json, eos_ids, vocab_size)

    @property
    def num_tokens(self) -> int:
        """Bits of a mask: the larger of `vocab_size` and the tokenizer's size."""
        return self._tokenizer.vocab_size

    def compile(self, grammar: common_pb2.Grammar) -> LLMatcher:
        """Return a matcher at the start of `grammar`, with its first mask computed once.

        Raises GrammarError with the cause.
        """
        return _on_deep_stack(lambda: self._compile(grammar))

    def _compile(self, grammar: common_pb2.Grammar) -> LLMatcher:
        matcher = LLMatcher(self._tokenizer, _engine_text(grammar.kind, grammar.text), log_level=0, limits=LIMITS)
        self._check(matcher, grammar)
        matcher.compute_bitmask()
        if matcher.is_error() and "NoExtension" in matcher.get_error():
            raise GrammarError("matches nothing: no output could satisfy it")
        self._check(matcher, grammar)
        return matcher

    def check(self, grammar: common_pb2.Grammar) -> None:
        """Raise GrammarError if `grammar` does not compile.

        Also raised if the mask after one allowed token exceeds the limits.
        """
        matcher = self.compile(grammar)
        ends = self._tokenizer.eos_tokens
        first = next(
            (token_id for token_id in np.flatnonzero(_allowed(matcher)).tolist() if token_id not in ends), None
        )
        if first is not None and matcher.try_consume_tokens([first]):
            matcher.compute_bitmask()
        if "NoExtension" not in matcher.get_error():
            self._check(matcher, grammar)

    def first_tokens(self, grammar: common_pb2.Grammar) -> NDArray[np.bool_]:
        """Return bool [num_tokens]: the tokens that an output may begin with. Raises GrammarError as `compile`."""
        return _allowed(self.compile(grammar))

    def encode(self, text: str) -> list[int]:
        """Token ids of `text`; special tokens are encoded as plain text."""
        return self._tokenizer.tokenize_str(text)

    @staticmethod
    def _check(matcher: LLMatcher, grammar: common_pb2.Grammar) -> None:
        if matcher.is_error():
            raise GrammarError(redacted(readable(grammar.kind, matcher.get_error()), grammar.text))


def _on_deep_stack(work: Callable[[], T]) -> T:
    """Run `work` on a thread of its own with a stack of 256 MiB, of which only what it touches takes memory.

    Starting and ending the thread takes about 0.2 ms.
    """
    with ThreadPoolExecutor(1) as thread:
        with _stack_size:
            usual = threading.stack_size(_STACK_BYTES)
            try:
                future = thread.submit(work)
            finally:
                threading.stack_size(usual)
        return future.result()


def _allowed(matcher: LLMatcher) -> NDArray[np.bool_]:
    bits = np.frombuffer(matcher.compute_bitmask(), np.uint8)
    return np.unpackbits(bits, bitorder="little").view(np.bool_)


def _tokenizer(tokenizer_json: bytes, eos_ids: Sequence[int], vocab_size: int) -> LLTokenizer:
    try:
        text = tokenizer_json.decode()
        own_size = LLTokenizer(text, eos_token=0, slices=[]).vocab_size
        # An end token that the tokenizer does not have (an id in the padding) can never be sampled.
        ends = sorted({eos_id for eos_id in eos_ids if eos_id < own_size})
        if ends:
            return LLTokenizer(text, n_vocab=max(own_size, vocab_size), eos_token=ends)
    except Exception as error:  # llguidance raises ValueError, or an exception for a panic of its Rust code
        raise GrammarError(f"is not possible with this model's tokenizer: {_line(str(error))}") from error
    raise GrammarError("is not possible: the model has no end-of-sequence token, an output could not end")


# --- grammars in llguidance's form --------------------------------------------------------------------------------------


def _engine_text(kind: common_pb2.GrammarKind, text: str) -> str:
    """The grammar as llguidance's envelope. Built from parsed values, so no text can escape from its place."""
    if kind == JSON_SCHEMA:
        return _envelope(json_schema=with_bounded_whitespace(json.loads(text)))
    if kind == REGEX:
        return LLMatcher.grammar_from_regex(text)
    if kind == CHOICE:
        return _envelope(lark_grammar=_choice_lark(json.loads(text)))
    if kind == LARK:
        return _envelope(lark_grammar=text)
    raise GrammarError("is of a kind that this release does not know")


def _envelope(**grammar: Any) -> str:
    return json.dumps({"grammars": [grammar]})


def with_bounded_whitespace(schema: Any) -> Any:
    """Return `schema` with bounded whitespace, unless its own `x-guidance` sets a whitespace option."""
    if schema is True:
        schema = {}
    if not isinstance(schema, dict):
        return schema
    options = schema.get("x-guidance", {})
    if not isinstance(options, dict) or any(name.startswith("whitespace") for name in options):
        return schema
    return schema | {"x-guidance": options | {"whitespace_pattern": WHITESPACE}}


def _choice_lark(choices: Any) -> str:
    if not (choices and isinstance(choices, list) and all(isinstance(choice, str) for choice in choices)):
        raise GrammarError("must be a list of strings, at least one")
    # One terminal instead of a rule of many: the lexer then keeps every choice open that matches the text so
    # far.
    return "start: CHOICE\nCHOICE: " + " | ".join(json.dumps(choice) for choice in choices)


# --- error messages -----------------------------------------------------------------------------------------------------

_WHAT = {
    JSON_SCHEMA: "is no JSON schema that can be used",
    REGEX: "is no regular expression that can be used",
    CHOICE: "is no choice that can be used",
    LARK: "is no Lark grammar that can be used",
}
_UNIMPLEMENTED = re.compile(r"Unimplemented keys: \[(.*)\]")
_REGEX_ERROR = re.compile(r"^error: (.*)$", re.MULTILINE)
_TOO_COMPLEX = ("TooComplex", "fuel", "too large", "Too many items", "too many expressions", "items; max is")
_PLACE = re.compile(r"^(?:at )?(\d+)\((\d+)\): ")


def readable(kind: common_pb2.GrammarKind, error: str) -> str:
    """Extract one clause from an error of llguidance, without its excerpts of the grammar."""
    return f"{_WHAT.get(kind, 'is no grammar that can be used')}: {_reason(kind, error)}"


def _reason(kind: common_pb2.GrammarKind, error: str) -> str:
    if found := _UNIMPLEMENTED.search(error):
        return f"the keywords {found[1]} are not supported; leave them out"
    if "recursion limit" in error:
        return "it is nested too deeply"
    if any(word in error for word in _TOO_COMPLEX):
        return f"it is too complex ({_line(error)}); use fewer alternatives or smaller bounds"
    place = _PLACE.match(error) if kind == LARK else None
    reason = found[1] if (found := _REGEX_ERROR.search(error)) else _line(_PLACE.sub("", error))
    return f"line {place[1]}, column {place[2]}: {reason}" if place else reason


def _line(text: str) -> str:
    return next((line.strip() for line in text.splitlines() if line.strip()), "unknown reason")[:300]
