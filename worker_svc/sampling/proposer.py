"""Guesses of a row's next tokens, to be verified by replay of the sampler: a guess costs time when it is wrong, never a token.

The seam is `Proposer`; a draft model could implement it as the n-gram proposer here does. No torch.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

IntArray = NDArray[np.int32]

_LONGEST_NGRAM = 4


@dataclass(frozen=True, slots=True)
class DraftAsk:
    """`num_tokens` guesses wanted at most after the known `token_ids` (a view, valid during the call) of a row."""

    row: int
    token_ids: IntArray
    num_tokens: int


class Proposer(Protocol):
    """Guesses; called from the engine's thread, once in each step that has rows with drafts."""

    def propose(self, asks: Sequence[DraftAsk]) -> list[IntArray]:
        """Up to `num_tokens` guesses for each ask, in order; fewer or none where it has no better."""
        ...

    def forget(self, rows: IntArray) -> None:
        """Rows that leave; their indexes may be used again. Also called for rows never asked for."""
        ...


class NgramProposer:
    """Prompt lookup: what followed the last time that the row's last few tokens stood in it (A. Saxena, 2023).

    The longest n-gram of 1 to `longest` last tokens that occurs earlier decides; of several occurrences the most recent. Where
    fewer tokens than wanted follow it, they are taken to repeat. Stateless.
    """

    def __init__(self, longest: int = _LONGEST_NGRAM) -> None:
        self._longest = longest

    def propose(self, asks: Sequence[DraftAsk]) -> list[IntArray]:
        """See Proposer."""
        return [self._lookup(ask.token_ids, ask.num_tokens) for ask in asks]

    def forget(self, rows: IntArray) -> None:
        """See Proposer."""

    def _lookup(self, token_ids: IntArray, num_tokens: int) -> IntArray:
        for size in range(min(self._longest, len(token_ids) - 1), 0, -1):
            # Without the last token: an occurrence must have something after it.
            windows = sliding_window_view(token_ids[:-1], size)
            found = np.flatnonzero((windows == token_ids[-size:]).all(axis=1))
            if len(found):
                begin = int(found[-1]) + size
                return np.resize(token_ids[begin:], num_tokens)
        return token_ids[:0].copy()
