"""Check grammars of structured output before accepting a request.

Pure: no I/O, no torch; also used in process by `quire.LLM`.

    checker = GrammarChecker(bundle.tokenizer_json, limits.eos_token_ids, limits.vocab_size)
    grammar = checker.check(common_pb2.GRAMMAR_KIND_REGEX, "[a-z]+")        # normalised, for ResolvedSampling.grammar
"""

import hashlib
import json
import threading
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pydantic_core import from_json

from gateway_svc.checks.schema_patterns import MAX_CONJOINED, most_conjoined
from protos.common.v1 import common_pb2
from svc_common.constraints import GRAMMAR_FIELDS
from svc_common.errors import InvalidArgument
from svc_common.grammars import CHOICE, JSON_SCHEMA, LARK, REGEX, GrammarCompiler, GrammarError

# Regular expressions take time quadratic in their length in the worst case: 0.2 s at this size. Lark grammars
# contain many.
MAX_GRAMMAR_BYTES = {JSON_SCHEMA: 256 * 1024, REGEX: 32 * 1024, CHOICE: 256 * 1024, LARK: 64 * 1024}
MAX_CHOICES = 10_000
MAX_REMEMBERED = 1024


class GrammarChecker:
    """Compiles grammars for one model to refuse bad ones; caches recent verdicts by digest. Thread-safe.

    A check takes well under a millisecond for most grammars and up to seconds for the worst within the size
    limit, so call it off the event loop (it lets other threads run). The first check also reads the tokenizer
    (about 1 s for 100,000 tokens).
    """

    def __init__(self, tokenizer_json: bytes, eos_ids: Sequence[int], vocab_size: int) -> None:
        self._model = (tokenizer_json, tuple(eos_ids), vocab_size)
        self._compiler: GrammarCompiler | None = None
        self._verdicts: OrderedDict[bytes, str] = OrderedDict()
        self._lock = threading.Lock()

    def check(self, kind: common_pb2.GrammarKind, text: str, *, field: str = "structured_output") -> common_pb2.Grammar:
        """Return the grammar in the worker's form: JSON texts compacted, others verbatim.

        Raises InvalidArgument naming the field (`structured_output.regex`) if the grammar, its size or the
        model's tokenizer is unsuitable.
        """
        if kind not in GRAMMAR_FIELDS:
            raise InvalidArgument.field(field, "is of no known kind; give json_schema, regex, choice or lark")
        return self.check_at(f"{field}.{GRAMMAR_FIELDS[kind]}", kind, text)

    def check_at(self, place: str, kind: common_pb2.GrammarKind, text: str) -> common_pb2.Grammar:
        """Like `check`, naming `place` in errors."""
        try:
            grammar = common_pb2.Grammar(kind=kind, text=_normalised(kind, text))
        except GrammarError as error:
            raise InvalidArgument.field(place, str(error)) from error
        return self._good(place, grammar)

    def check_made(self, place: str, text: str) -> common_pb2.Grammar:
        """Check a Lark grammar of any length that the gateway built from checked parts.

        Raises InvalidArgument naming `place` if it is too complex.
        """
        return self._good(place, common_pb2.Grammar(kind=LARK, text=text))

    def first_tokens(self, grammar: common_pb2.Grammar) -> NDArray[np.bool_]:
        """Return bool [vocab_size]: tokens that an output may begin with. `grammar` was checked here."""
        return self._need_compiler().first_tokens(grammar)[: self._model[2]]

    def _good(self, place: str, grammar: common_pb2.Grammar) -> common_pb2.Grammar:
        try:
            verdict = self._verdict(grammar)
        except GrammarError as error:  # the model's tokenizer cannot be used
            verdict = str(error)
        if verdict:
            raise InvalidArgument.field(place, verdict)
        return grammar

    def _verdict(self, grammar: common_pb2.Grammar) -> str:
        """Return what is wrong with the grammar; empty = nothing."""
        digest = hashlib.sha256(f"{grammar.kind}:{grammar.text}".encode()).digest()
        with self._lock:
            known = self._verdicts.get(digest)
            if known is not None:
                self._verdicts.move_to_end(digest)
                return known
        verdict = self._compile(grammar)
        with self._lock:
            self._verdicts[digest] = verdict
            if len(self._verdicts) > MAX_REMEMBERED:
                self._verdicts.popitem(last=False)
        return verdict

    def _compile(self, grammar: common_pb2.Grammar) -> str:
        compiler = self._need_compiler()
        try:
            compiler.check(grammar)
        except GrammarError as error:
            return str(error)
        return ""

    def _need_compiler(self) -> GrammarCompiler:
        with self._lock:
            if self._compiler is None:
                self._compiler = GrammarCompiler(*self._model)
            return self._compiler


# --- normalisation ------------------------------------------------------------------------------------------------------


def _normalised(kind: common_pb2.GrammarKind, text: str) -> str:
    _check_text(kind, text)
    if kind == JSON_SCHEMA:
        return _compact(_schema(text))
    if kind == CHOICE:
        return _compact(_choices(text))
    return text


def _check_text(kind: common_pb2.GrammarKind, text: str) -> None:
    try:
        num_bytes = len(text.encode())
    except UnicodeEncodeError as error:
        raise GrammarError("is no valid Unicode: it has a lone surrogate") from error
    if not text.strip():
        raise GrammarError("is empty")
    if num_bytes > MAX_GRAMMAR_BYTES[kind]:
        raise GrammarError(f"has {num_bytes} bytes; at most {MAX_GRAMMAR_BYTES[kind]} are allowed")


def _schema(text: str) -> Any:
    schema = _parsed(text)
    if not isinstance(schema, dict | bool):
        raise GrammarError("must be a JSON object or true (any JSON)")
    num_conjoined = most_conjoined(schema)
    if num_conjoined > MAX_CONJOINED:
        raise GrammarError(
            f"demands {num_conjoined} patterns and formats of one string (by allOf); at most {MAX_CONJOINED} can be "
            "combined: write them as fewer"
        )
    return schema


def _choices(text: str) -> list[str]:
    choices = _parsed(text)
    if not isinstance(choices, list) or not all(isinstance(choice, str) for choice in choices):
        raise GrammarError("must be a list of strings")
    if not 1 <= len(choices) <= MAX_CHOICES:
        raise GrammarError(f"has {len(choices)} strings; give 1 to {MAX_CHOICES}")
    if not all(choices):
        raise GrammarError("has an empty string; an output has at least one character")
    return list(dict.fromkeys(choices))


def _parsed(text: str) -> Any:
    try:
        return from_json(text, allow_inf_nan=False)
    except ValueError as error:
        raise GrammarError(f"is no JSON: {error}") from error


def _compact(value: Any) -> str:
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    except ValueError as error:  # 1e999 became infinite
        raise GrammarError("is no JSON of use: it has a number that is out of range") from error
