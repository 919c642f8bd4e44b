"""Interface of grammars: the tokens that a row may draw next, as bit masks. `grammar_masks.py` implements it.

The step runner reports changes of rows and requests masks for the tokens about to be drawn. An implementation
keeps one state per row: its grammar after all tokens that the row has committed. This module imports neither
torch nor a grammar engine.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from protos.common.v1 import common_pb2

Bits = NDArray[np.int32]
"""[n, num_words(vocab_size)]: bit `i % 32` of word `i // 32` says whether token i may be drawn (llguidance's layout)."""


def num_words(vocab_size: int) -> int:
    """Words of one mask."""
    return -(-vocab_size // 32)


@dataclass(frozen=True, slots=True)
class MaskAsk:
    """Masks requested for one row in one step: `len(draft_ids) + 1`, from line `at` of the step's masks on.

    Line `at + j` is for the token after the row's committed ones and `draft_ids[:j]`. Without draft tokens it
    is one line.
    """

    row: int
    draft_ids: Sequence[int]
    at: int


@dataclass(frozen=True, slots=True)
class MaskWork:
    """Cost of computing masks, and the rows that failed by it.

    `cpu_ns`: CPU time by row, of those that needed masks. `flags`: RowFlag by row, of those that failed.
    `num_threads`: threads that shared the work. `budget_ms`: the limit of rows with ROW_FLAG_MASK_BUDGET.
    """

    cpu_ns: Mapping[int, int] = field(default_factory=dict)
    flags: Mapping[int, int] = field(default_factory=dict)
    num_threads: int = 1
    budget_ms: float = 0.0


NO_WORK = MaskWork()


class TokenMasks(Protocol):
    """Grammar states by row index.

    Called by one thread at a time; no method raises because of a grammar or a token.

    A row gets masks of zeros from then on, and so fails alone, if its grammar cannot be compiled, refuses a
    committed token, reaches a limit of the grammar engine or exceeds its time budget. A row with an ended
    grammar (complete, its end-of-sequence token accepted) gets masks of ones: it may compute one more token
    before it is removed, which is discarded.
    """

    def add(self, row: int, grammar: common_pb2.Grammar, output_ids: Sequence[int]) -> None:
        """Add a row with a grammar that is not UNSPECIFIED.

        `output_ids`: its known tokens after the prompt (of an earlier incarnation, or of the beam or sibling
        it continues). The index is free: its row was removed or never existed.
        """
        ...

    def remove(self, row: int) -> None:
        """Remove a row that was added."""
        ...

    def clear(self) -> None:
        """Remove all rows."""
        ...

    def accept(self, row: int, token_ids: Sequence[int]) -> None:
        """Commit tokens of an added row, in order.

        They were drawn (with accepted draft tokens, never rejected ones) or sent by the scheduler (a beam's).
        """
        ...

    def fill(self, asks: Sequence[MaskAsk], masks: Bits) -> MaskWork:
        """Write the masks of `asks`, each to its own lines of `masks`, whatever these held before.

        Bits beyond the vocabulary do not matter. States are unchanged afterwards: draft tokens are tried and
        rolled back. If the grammar refuses `draft_ids[:j]`, the lines from `at + j` on are undefined.
        """
        ...


class NoMasks:
    """Masks of a worker without grammars: rows with a grammar fail, other rows never ask."""

    def add(self, row: int, grammar: common_pb2.Grammar, output_ids: Sequence[int]) -> None:
        """See TokenMasks."""

    def remove(self, row: int) -> None:
        """See TokenMasks."""

    def clear(self) -> None:
        """See TokenMasks."""

    def accept(self, row: int, token_ids: Sequence[int]) -> None:
        """See TokenMasks."""

    def fill(self, asks: Sequence[MaskAsk], masks: Bits) -> MaskWork:
        """Close all tokens, since no grammar is available."""
        for ask in asks:
            masks[ask.at : ask.at + len(ask.draft_ids) + 1] = 0
        return NO_WORK
