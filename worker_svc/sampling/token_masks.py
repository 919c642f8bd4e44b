"""The seam of grammars: which tokens a row may draw next, as bit masks. No torch, no grammar engine: `grammar.py` implements it.

The step runner tells the masks what becomes of rows and asks for those of the tokens about to be drawn. An implementation keeps one
state per row: its grammar after all tokens that the row has committed.
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
    """The masks wanted for one row in one step: `len(draft_ids) + 1` of them, from line `at` of the step's masks on.

    Line `at + j` is for the token after the row's committed ones and `draft_ids[:j]`. Without drafts it is one line.
    """

    row: int
    draft_ids: Sequence[int]
    at: int


@dataclass(frozen=True, slots=True)
class MaskWork:
    """What computing masks took and which rows failed by it.

    `cpu_ns`: CPU time by row, of those whose masks were computed. `flags`: RowFlag by row, of those that failed.
    `num_threads`: that shared it; `budget_ms`: the limit of rows with ROW_FLAG_MASK_BUDGET.
    """

    cpu_ns: Mapping[int, int] = field(default_factory=dict)
    flags: Mapping[int, int] = field(default_factory=dict)
    num_threads: int = 1
    budget_ms: float = 0.0


NO_WORK = MaskWork()


class TokenMasks(Protocol):
    """States of grammars by row index. Called by one thread at a time; no method raises for what a grammar or a token is.

    A row whose grammar cannot be compiled, refuses a committed token, reaches a limit of the grammar engine or takes more time than
    its budget gets masks of zeros from then on: that row fails and no other does. A row whose grammar has ended (complete, its
    end-of-sequence token taken) gets masks of ones: it may compute one more token before it is removed, which is discarded.
    """

    def add(self, row: int, grammar: common_pb2.Grammar, output_ids: Sequence[int]) -> None:
        """A row joins whose grammar is not UNSPECIFIED; `output_ids`: its known tokens after the prompt (those of an earlier life,
        or of the beam or sibling it goes on for). The index is free: its row was removed or never was."""
        ...

    def remove(self, row: int) -> None:
        """A row that was added leaves."""
        ...

    def clear(self) -> None:
        """All rows leave."""
        ...

    def accept(self, row: int, token_ids: Sequence[int]) -> None:
        """Tokens that an added row commits, in order: drawn (accepted drafts included, rejected ones never), or told (a beam's)."""
        ...

    def fill(self, asks: Sequence[MaskAsk], masks: Bits) -> MaskWork:
        """Writes the masks of `asks`, each its own lines of `masks` (which holds anything before); bits past the vocabulary do not
        matter. States are afterwards as before: drafts are tried and rolled back. Where the grammar refuses `draft_ids[:j]`, lines
        from `at + j` on are of no use to anybody and may hold anything."""
        ...


class NoMasks:
    """A worker without grammars: rows that bring one fail by themselves, all others never ask."""

    def add(self, row: int, grammar: common_pb2.Grammar, output_ids: Sequence[int]) -> None:
        """See TokenMasks."""

    def remove(self, row: int) -> None:
        """See TokenMasks."""

    def clear(self) -> None:
        """See TokenMasks."""

    def accept(self, row: int, token_ids: Sequence[int]) -> None:
        """See TokenMasks."""

    def fill(self, asks: Sequence[MaskAsk], masks: Bits) -> MaskWork:
        """No token fits a grammar that nobody reads."""
        for ask in asks:
            masks[ask.at : ask.at + len(ask.draft_ids) + 1] = 0
        return NO_WORK
