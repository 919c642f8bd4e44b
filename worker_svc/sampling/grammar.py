"""Structured output on the worker: one grammar state per row, and the masks of the tokens that may come next (design.md 3.3).

`GrammarMasks` implements `token_masks.TokenMasks` on llguidance. Compiling is `grammar_cache.py`'s, in a thread of its own;
the states advance on the engine's thread. No torch.
"""

import os
from collections.abc import Sequence

import numpy as np
from llguidance import LLExecutor, LLMatcher
from llguidance.numpy import fill_next_token_bitmask_par, fill_next_token_bitmask_par_with_draft_tokens

from protos.common.v1 import common_pb2
from protos.worker.v1 import worker_pb2
from worker_svc.sampling.grammar_cache import CompiledGrammar, GrammarCache
from worker_svc.sampling.token_masks import Bits, MaskAsk, num_words

_ALL = np.int32(-1)
_MAX_THREADS = 8

Wanted = tuple[LLMatcher, int, list[int]]
"""A matcher, the first line of its masks, the drafts to try."""


class RowGrammar:
    """State of one row: its grammar after the tokens it was told. Owns its matcher.

    `ended`: complete, with its end-of-sequence token taken. `failed`: no compiled grammar, a token that it refuses, or a limit of
    the grammar engine reached. Both are for good.
    """

    __slots__ = ("_compiled", "_eos_ids", "_matcher", "_waiting", "ended", "failed")

    def __init__(self, compiled: CompiledGrammar, eos_ids: frozenset[int], output_ids: Sequence[int]) -> None:
        self._compiled: CompiledGrammar | None = compiled
        self._eos_ids = eos_ids
        self._matcher: LLMatcher | None = None
        self._waiting = list(output_ids)
        self.ended = self.failed = False

    def accept(self, token_ids: Sequence[int]) -> None:
        """Tokens that the row commits; taken in at once, or with the first mask if the grammar is still being compiled."""
        self._waiting.extend(token_ids)
        if self._matcher is not None:
            self._catch_up()

    def matcher(self) -> LLMatcher | None:
        """At the row's committed tokens; None once ended or failed. Waits for the compiler, the first time."""
        if self._matcher is None and self._compiled is not None:
            self._matcher, self._compiled = self._compiled.new_matcher(), None
            self.failed = self._matcher is None
        self._catch_up()
        return None if self.ended or self.failed else self._matcher

    def check(self) -> None:
        """After a mask was computed: whether the engine could go on."""
        self.failed = self.failed or (self._matcher is not None and self._matcher.is_error())

    def _catch_up(self) -> None:
        waiting, self._waiting = self._waiting, []
        if not waiting or self._matcher is None or self.ended or self.failed:
            return
        num_taken = self._matcher.try_consume_tokens(waiting)
        if num_taken < len(waiting):
            self._end(waiting[num_taken])
        else:
            self.ended = self._matcher.stop_reason() == "EndOfSentence"
        self.check()

    def _end(self, token_id: int) -> None:
        """A token that the matcher does not take: it takes nothing after the end, the end-of-sequence token neither."""
        matcher = self._matcher
        assert matcher is not None
        is_end = token_id in self._eos_ids and matcher.is_accepting()
        self.ended = is_end or matcher.stop_reason() == "EndOfSentence"
        self.failed = not self.ended


class GrammarMasks:
    """See TokenMasks. Owns the rows' grammar states, the cache of compiled grammars and the threads that compute masks.

    `tokenizer_json`: of the checkpoint; `eos_ids`: ids that end an output; `vocab_size`: logits per position. A tokenizer that
    llguidance cannot read fails the rows that bring a grammar, not the worker.
    """

    def __init__(self, tokenizer_json: bytes, eos_ids: Sequence[int], vocab_size: int) -> None:
        self._cache = GrammarCache(tokenizer_json, eos_ids, vocab_size)
        self._eos_ids = frozenset(eos_ids)
        self._vocab_size = vocab_size
        self._executor = LLExecutor(num_threads=max(1, min(_MAX_THREADS, (os.cpu_count() or 1) // 2)))
        self._rows: dict[int, RowGrammar] = {}

    @classmethod
    def of_bundle(cls, data: bytes) -> "GrammarMasks":
        """Those for the model of a serialised `ModelBundle`."""
        bundle = worker_pb2.ModelBundle.FromString(data)
        return cls(bundle.tokenizer_json, bundle.limits.eos_token_ids, bundle.limits.vocab_size)

    def add(self, row: int, grammar: common_pb2.Grammar, output_ids: Sequence[int]) -> None:
        """See TokenMasks. Starts compiling; the first mask waits for it."""
        self._rows[row] = RowGrammar(self._cache.compiled(grammar), self._eos_ids, output_ids)

    def remove(self, row: int) -> None:
        """See TokenMasks."""
        self._rows.pop(row, None)

    def clear(self) -> None:
        """See TokenMasks. Compiled grammars are kept."""
        self._rows.clear()

    def accept(self, row: int, token_ids: Sequence[int]) -> None:
        """See TokenMasks."""
        self._rows[row].accept(token_ids)

    def fill(self, asks: Sequence[MaskAsk], masks: Bits) -> None:
        """See TokenMasks: all rows in parallel."""
        states = [self._rows[ask.row] for ask in asks]
        wanted = []
        for ask, state in zip(asks, states, strict=True):
            matcher = state.matcher()
            # Ones also where drafts go on after the grammar's end: there the engine writes nothing.
            masks[ask.at : ask.at + len(ask.draft_ids) + 1] = _ALL
            if matcher is not None:
                wanted.append((matcher, ask.at, [int(token_id) for token_id in ask.draft_ids]))
        if wanted:
            self._compute(wanted, masks)
        for ask, state in zip(asks, states, strict=True):
            state.check()
            if state.failed:
                masks[ask.at : ask.at + len(ask.draft_ids) + 1] = 0

    def _compute(self, wanted: list[Wanted], masks: Bits) -> None:
        num_tokens = self._cache.num_tokens
        if num_words(num_tokens) == masks.shape[1] and masks.flags.c_contiguous:
            self._compute_whole(wanted, masks)
            return
        # A tokenizer with more tokens than the model has logits: computed whole, the words that exist are kept.
        whole = np.full((len(masks), num_words(num_tokens)), _ALL, np.int32)
        self._compute_whole(wanted, whole)
        for _, at, draft_ids in wanted:
            lines = slice(at, at + len(draft_ids) + 1)
            masks[lines] = whole[lines, : masks.shape[1]]

    def _compute_whole(self, wanted: list[Wanted], masks: Bits) -> None:
        drafted = [(matcher, at, draft_ids) for matcher, at, draft_ids in wanted if draft_ids]
        plain = [(matcher, at) for matcher, at, draft_ids in wanted if not draft_ids]
        if plain:
            fill_next_token_bitmask_par(self._executor, plain, masks)
        if drafted:
            fill_next_token_bitmask_par_with_draft_tokens(self._executor, drafted, masks)
