"""Optional settings that few rows have (`RowOptions` of worker.proto): parsed, checked and kept by row index.

Numbers are columns, so that sampling stays vectorised; token lists are prepared once, when the row is
added. Does not import torch.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from enum import IntFlag
from typing import Any, NoReturn, TypeVar

import numpy as np
from numpy.typing import NDArray

from protos.common.v1 import common_pb2
from protos.worker.v1 import worker_pb2
from svc_common import wire_arrays
from svc_common.errors import InvalidArgument

IntArray = NDArray[np.int32]
LongArray = NDArray[np.int64]
FloatArray = NDArray[np.float32]

_Number = TypeVar("_Number", int, float)

NO_PROMPT_LOGPROBS = -1
MOST_TOPS = 20
_MOST_CHILDREN = 65_536
_EMPTY = np.zeros(0, np.int64)


class Rule(IntFlag):
    """Rules that change a row's logits before a token is drawn."""

    GRAMMAR = 1
    ALLOWED = 2
    BAD_WORDS = 4
    MIN_TOKENS = 8
    BIAS = 16
    PENALTY = 32


@dataclass(frozen=True, slots=True)
class BadWords:
    """m token sequences, each split into its last token and those before it.

    `lasts` [m]: last tokens. `sizes` [m]: number of tokens before them. `before` [sum of sizes]: those
    tokens.
    """

    lasts: LongArray
    sizes: LongArray
    before: LongArray


@dataclass(frozen=True, slots=True)
class RowExtras:
    """Token lists of one row, ready to be concatenated with those of other rows. Empty means none. Token ids are int64."""

    bias_ids: LongArray
    biases: FloatArray
    allowed_ids: LongArray
    bad_words: BadWords
    min_tokens_ids: LongArray
    grammar: common_pb2.Grammar


@dataclass(slots=True)
class OptionColumns:
    """Options of n rows, arrays of equal length.

    `repetition_penalties`: 1 = off. `num_prompt_tops`: NO_PROMPT_LOGPROBS = no prompt logprobs.
    `num_children`: 1 = one token at a time. `rules`: Rule bits. `tasks`: values of `Task`. `extras`: None =
    no lists.
    """

    min_ps: FloatArray
    repetition_penalties: FloatArray
    presence_penalties: FloatArray
    frequency_penalties: FloatArray
    num_tops: IntArray
    num_prompt_tops: IntArray
    min_tokens: IntArray
    num_children: IntArray
    num_candidates: IntArray
    adapter_ids: IntArray
    tasks: IntArray
    rules: IntArray
    extras: list[RowExtras | None]

    @classmethod
    def defaults(cls, n: int) -> "OptionColumns":
        """Columns for n rows without options."""
        zeros = [np.zeros(n, np.float32) for _ in range(4)] + [np.zeros(n, np.int32) for _ in range(8)]
        made = cls(*zeros, [None] * n)
        made.repetition_penalties[:] = 1
        made.num_prompt_tops[:] = NO_PROMPT_LOGPROBS
        made.num_children[:] = 1
        return made

    def put(self, rows: IntArray, given: "OptionColumns") -> None:
        """Set the options of row `rows[i]` to entry i of `given`."""
        for name in _ARRAYS:
            getattr(self, name)[rows] = getattr(given, name)
        for row, extras in zip(rows.tolist(), given.extras, strict=True):
            self.extras[row] = extras

    def grow(self, more: int) -> None:
        """Append `more` rows without options."""
        new = OptionColumns.defaults(more)
        for name in _ARRAYS:
            setattr(self, name, np.concatenate([getattr(self, name), getattr(new, name)]))
        self.extras += new.extras


_ARRAYS = tuple(f.name for f in fields(OptionColumns) if f.name != "extras")


def read_options(messages: Sequence[worker_pb2.RowOptions], rows: IntArray, vocab_size: int) -> OptionColumns:
    """Parse the options of the added `rows`. Raises InvalidArgument naming field and row."""
    made = OptionColumns.defaults(len(rows))
    last = -1
    for message in messages:
        if not last < message.at < len(rows):
            raise InvalidArgument.field("added.options.at", f"is {message.at} after {last}, of {len(rows)} added rows")
        last = message.at
        _Reader(message, int(rows[last]), vocab_size).read_into(made, last)
    return made


class _Reader:
    """Parses one row's options; every error names the row."""

    def __init__(self, message: worker_pb2.RowOptions, row: int, vocab_size: int) -> None:
        self._message, self._sampling, self._row, self._vocab_size = message, message.sampling, row, vocab_size

    def read_into(self, made: OptionColumns, at: int) -> None:
        self._read_numbers(made, at)
        self._read_counts(made, at)
        self._check_kinds()
        made.extras[at] = extras = self._extras()
        made.rules[at] = self._rules(made, at, extras)

    def _read_numbers(self, made: OptionColumns, at: int) -> None:
        s = self._sampling
        made.min_ps[at] = self._within("sampling.min_p", s.min_p, 0, 1)
        made.presence_penalties[at] = self._within("sampling.presence_penalty", s.presence_penalty, -2, 2)
        made.frequency_penalties[at] = self._within("sampling.frequency_penalty", s.frequency_penalty, -2, 2)
        repetition = self._within("sampling.repetition_penalty", s.repetition_penalty, 0, np.finfo(np.float32).max)
        made.repetition_penalties[at] = repetition or 1

    def _read_counts(self, made: OptionColumns, at: int) -> None:
        s, m, within = self._sampling, self._message, self._within
        made.num_tops[at] = min(within("sampling.num_top_logprobs", s.num_top_logprobs, 0, MOST_TOPS), self._vocab_size)
        if s.HasField("num_prompt_logprobs"):
            wanted = within("sampling.num_prompt_logprobs", s.num_prompt_logprobs, 0, MOST_TOPS)
            made.num_prompt_tops[at] = min(wanted, self._vocab_size)
        made.min_tokens[at] = within("min_tokens", m.min_tokens, 0, np.iinfo(np.int32).max)
        made.num_children[at] = within("num_children", m.num_children, 0, _MOST_CHILDREN) or 1
        made.num_candidates[at] = within("num_candidates", m.num_candidates, 0, self._vocab_size)
        made.adapter_ids[at] = within("adapter_id", m.adapter_id, 0, np.iinfo(np.int32).max)
        made.tasks[at] = self._known("task", m.task, common_pb2.Task.values())

    def _check_kinds(self) -> None:
        """Check that the row yields only one of tokens, candidates and an embedding."""
        m = self._message
        if m.num_candidates and m.num_children > 1:
            self._refuse("num_children", "a beam yields candidates and cannot have children")
        if m.task and (m.num_candidates or m.num_children > 1):
            self._refuse("task", "a row with a task yields an embedding, not candidates or children")
        if m.task and self._sampling.HasField("num_prompt_logprobs"):
            self._refuse("sampling.num_prompt_logprobs", "a row with a task yields an embedding, not log probabilities")

    def _extras(self) -> RowExtras | None:
        s, m = self._sampling, self._message
        self._known("sampling.grammar.kind", s.grammar.kind, common_pb2.GrammarKind.values())
        bias_ids, biases = self._biases()
        extras = RowExtras(
            bias_ids=bias_ids,
            biases=biases,
            allowed_ids=self._tokens("sampling.allowed_token_ids", s.allowed_token_ids),
            bad_words=self._bad_words(),
            min_tokens_ids=self._tokens("min_tokens_ids", m.min_tokens_ids),
            grammar=s.grammar,
        )
        lists = (bias_ids, extras.allowed_ids, extras.bad_words.lasts, extras.min_tokens_ids)
        return extras if s.grammar.kind or any(len(found) for found in lists) else None

    def _rules(self, made: OptionColumns, at: int, extras: RowExtras | None) -> int:
        penalties = made.repetition_penalties[at] != 1 or made.presence_penalties[at] or made.frequency_penalties[at]
        rules = Rule.PENALTY if penalties else Rule(0)
        if extras is None:
            return rules
        for rule, has in (
            (Rule.GRAMMAR, bool(extras.grammar.kind)),
            (Rule.ALLOWED, len(extras.allowed_ids) > 0),
            (Rule.BAD_WORDS, len(extras.bad_words.lasts) > 0),
            (Rule.MIN_TOKENS, len(extras.min_tokens_ids) > 0 and made.min_tokens[at] > 0),
            (Rule.BIAS, len(extras.bias_ids) > 0),
        ):
            rules |= rule if has else 0
        return rules

    def _biases(self) -> tuple[LongArray, FloatArray]:
        ids = self._tokens("sampling.logit_bias_ids", self._sampling.logit_bias_ids)
        if len(np.unique(ids)) != len(ids):
            self._refuse("sampling.logit_bias_ids", "has the same token twice")
        biases = self._unpack("sampling.logit_biases", self._sampling.logit_biases, wire_arrays.F32)
        if len(biases) != len(ids):
            self._refuse("sampling.logit_biases", f"has {len(biases)} elements for {len(ids)} ids")
        if not (np.abs(biases) <= 100).all():
            self._refuse("sampling.logit_biases", "must be in [-100, 100]")
        return ids, biases.astype(np.float32)

    def _bad_words(self) -> BadWords:
        words = [self._tokens("sampling.bad_words", word.token_ids) for word in self._sampling.bad_words]
        if not all(len(word) for word in words):
            self._refuse("sampling.bad_words", "has an empty sequence")
        return BadWords(
            lasts=np.array([word[-1] for word in words], np.int64),
            sizes=np.array([len(word) - 1 for word in words], np.int64),
            before=np.concatenate([word[:-1] for word in words]) if words else _EMPTY,
        )

    def _tokens(self, field: str, data: bytes) -> LongArray:
        if not data:
            return _EMPTY
        ids = self._unpack(field, data, wire_arrays.I32)
        if int(ids.min()) < 0 or int(ids.max()) >= self._vocab_size:
            self._refuse(field, f"has a token that is not in 0..{self._vocab_size - 1}")
        return ids.astype(np.int64)

    def _unpack(self, field: str, data: bytes, dtype: np.dtype) -> NDArray[Any]:
        if len(data) % dtype.itemsize:
            self._refuse(field, f"{len(data)} bytes are not a whole number of {dtype.name} elements")
        return np.frombuffer(data, dtype)

    def _within(self, field: str, value: _Number, least: float, most: float) -> _Number:
        if not least <= value <= most:
            self._refuse(field, f"is {value}, must be in [{least}, {most}]")
        return value

    def _known(self, field: str, value: int, values: Sequence[int]) -> int:
        if value not in values:
            self._refuse(field, f"{value} is not one of {sorted(values)}")
        return value

    def _refuse(self, field: str, what: str) -> NoReturn:
        raise InvalidArgument.field(f"added.options.{field}", f"row {self._row}: {what}")


Guard = Callable[[IntArray, IntArray, OptionColumns], None]
"""A check of added rows beyond the row table's own: (rows, numbers of computed tokens, options); raises InvalidArgument."""
