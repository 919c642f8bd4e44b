"""Proposes draft tokens, which `draft_verification` checks: a wrong one costs time but never changes the output.

The interface is `Proposer`, which the n-gram proposer implements here and draft models in `executor/model_drafts`. Does not import
torch.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from worker_svc.rows.batch import IntArray, StepBatch

_LONGEST_NGRAM = 4


@dataclass(frozen=True, slots=True)
class DraftAsk:
    """Request of up to `num_tokens` draft tokens after a row's known `token_ids` (a view, valid during the call)."""

    row: int
    token_ids: IntArray
    num_tokens: int


class Proposer(Protocol):
    """Proposes draft tokens. Called from the engine's thread."""

    follows: bool
    """True if `follow` must be called after each decode step that the model computes."""

    def propose(self, asks: Sequence[DraftAsk]) -> list[IntArray]:
        """Up to `num_tokens` draft tokens for each ask, in order; fewer or none if it has no better.

        Called before the model computes a step with such rows, after the step's blocks have been moved.
        """
        ...

    def follow(self, batch: StepBatch) -> None:
        """Compute what later proposals need of the tokens of `batch`, draft tokens included, which the model has computed.

        Called inside the queue's `inputs`, before the batch is committed.
        """
        ...


class NgramProposer:
    """Prompt lookup: the tokens that followed the last occurrence of the row's last few tokens (A. Saxena, 2023).

    The longest n-gram of the 1 to `longest` last tokens that occurs earlier is used; of several occurrences
    the most recent. If fewer tokens than requested follow it, they are repeated. Stateless.
    """

    follows = False

    def __init__(self, longest: int = _LONGEST_NGRAM) -> None:
        self._longest = longest

    def propose(self, asks: Sequence[DraftAsk]) -> list[IntArray]:
        """See Proposer."""
        return [self._lookup(ask.token_ids, ask.num_tokens) for ask in asks]

    def follow(self, batch: StepBatch) -> None:
        """See Proposer. No-op."""

    def _lookup(self, token_ids: IntArray, num_tokens: int) -> IntArray:
        for size in range(min(self._longest, len(token_ids) - 1), 0, -1):
            # Excludes the last token: an occurrence must have a successor.
            windows = sliding_window_view(token_ids[:-1], size)
            found = np.flatnonzero((windows == token_ids[-size:]).all(axis=1))
            if len(found):
                begin = int(found[-1]) + size
                return np.resize(token_ids[begin:], num_tokens)
        return token_ids[:0].copy()
