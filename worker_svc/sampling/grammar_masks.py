"""Structured output on the worker: masks of the tokens that each row may draw next.

`GrammarMasks` implements `token_masks.TokenMasks` on llguidance. `grammar_cache.py` compiles grammars on a
thread of its own; `row_grammar.py` holds one row's grammar and its time budget. Does not import torch.
"""

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from protos.common.v1 import common_pb2
from protos.worker.v1 import worker_pb2
from worker_svc.sampling.grammar_cache import GrammarCache
from worker_svc.sampling.row_grammar import MaskBudget, RowGrammar
from worker_svc.sampling.token_masks import Bits, MaskAsk, MaskWork, num_words

_ALL = np.int32(-1)
_MAX_THREADS = 8
_ROWS_OF_A_THREAD = 8
"""Minimum rows worth waking another thread for."""

Wanted = tuple[RowGrammar, MaskAsk]


class GrammarMasks:
    """See TokenMasks. Owns the rows' grammar states, the cache of compiled grammars and the mask threads.

    `tokenizer_json`: of the checkpoint. `eos_ids`: ids that end an output. `vocab_size`: logits per position.
    `budget`: for the masks of one row. If llguidance cannot read the tokenizer, rows with a grammar fail, but
    the worker does not.
    """

    def __init__(
        self, tokenizer_json: bytes, eos_ids: Sequence[int], vocab_size: int, budget: MaskBudget | None = None
    ) -> None:
        self._cache = GrammarCache(tokenizer_json, eos_ids, vocab_size)
        self._eos_ids = frozenset(eos_ids)
        self._vocab_size = vocab_size
        self._budget = budget or MaskBudget()
        self._num_threads = max(1, min(_MAX_THREADS, (os.cpu_count() or 1) // 2))
        self._threads = ThreadPoolExecutor(self._num_threads, thread_name_prefix="masks")
        self._rows: dict[int, RowGrammar] = {}

    @classmethod
    def of_bundle(cls, data: bytes, budget: MaskBudget | None = None) -> "GrammarMasks":
        """Masks for the model of a serialised `ModelBundle`."""
        bundle = worker_pb2.ModelBundle.FromString(data)
        return cls(bundle.tokenizer_json, bundle.limits.eos_token_ids, bundle.limits.vocab_size, budget)

    def add(self, row: int, grammar: common_pb2.Grammar, output_ids: Sequence[int]) -> None:
        """See TokenMasks. Starts compiling; the first mask waits for it."""
        self._rows[row] = RowGrammar(self._cache.compiled(grammar), self._eos_ids, output_ids, self._budget)

    def remove(self, row: int) -> None:
        """See TokenMasks."""
        self._rows.pop(row, None)

    def clear(self) -> None:
        """See TokenMasks. Compiled grammars are kept."""
        self._rows.clear()

    def accept(self, row: int, token_ids: Sequence[int]) -> None:
        """See TokenMasks. Consumed with the next mask."""
        self._rows[row].accept(token_ids)

    def fill(self, asks: Sequence[MaskAsk], masks: Bits) -> MaskWork:
        """See TokenMasks. Computes many rows in parallel."""
        states = [self._rows[ask.row] for ask in asks]
        wanted = [(state, ask) for state, ask in zip(states, asks, strict=True) if state.is_usable()]
        for ask in asks:
            masks[_lines(ask)] = _ALL
        if wanted:
            self._compute(wanted, masks)
        for state, ask in zip(states, asks, strict=True):
            if state.failed:
                masks[_lines(ask)] = 0
        return MaskWork(
            cpu_ns={ask.row: state.last_ns for state, ask in wanted},
            flags={ask.row: state.failed for state, ask in zip(states, asks, strict=True) if state.failed},
            num_threads=self._num_threads,
            budget_ms=self._budget.mean_ms,
        )

    def _compute(self, wanted: list[Wanted], masks: Bits) -> None:
        num_tokens = self._cache.num_tokens
        if num_words(num_tokens) == masks.shape[1] and masks.flags.c_contiguous:
            self._compute_whole(wanted, masks)
            return
        # The tokenizer has more tokens than the model has logits: compute whole masks, keep the words that
        # exist.
        whole = np.full((len(masks), num_words(num_tokens)), _ALL, np.int32)
        self._compute_whole(wanted, whole)
        for _, ask in wanted:
            masks[_lines(ask)] = whole[_lines(ask), : masks.shape[1]]

    def _compute_whole(self, wanted: list[Wanted], masks: Bits) -> None:
        share = max(_ROWS_OF_A_THREAD, -(-len(wanted) // self._num_threads))
        shares = [wanted[start : start + share] for start in range(0, len(wanted), share)]
        others = [self._threads.submit(_fill_all, rows, masks) for rows in shares[1:]]
        _fill_all(shares[0], masks)
        for other in others:
            other.result()


def _fill_all(wanted: list[Wanted], masks: Bits) -> None:
    for state, ask in wanted:
        state.fill(ask, masks)


def _lines(ask: MaskAsk) -> slice:
    return slice(ask.at, ask.at + len(ask.draft_ids) + 1)
