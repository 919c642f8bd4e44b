"""The fast-decode part of a plan and of its outcome: rows that advance by one token, expanded only on demand."""

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from scheduler_svc.core.entries import ScheduledSequence, SequenceTokens
from scheduler_svc.core.fast_decode.rows import Ints
from scheduler_svc.core.request import Group


@dataclass(slots=True)
class FastShare:
    """Rows of `members`, at least one, that compute one token each, at offset `computed_before`. `new_blocks`: by
    row, where some were added: one of each cache group.

    Shares with the same `batch_signature` have the same rows, each one token further than in the share before.
    """

    members: list[Group]
    rows: Ints
    computed_before: Ints
    batch_signature: object = field(default_factory=object)
    new_blocks: dict[int, list[int]] = field(default_factory=dict)

    def names(self) -> list[str]:
        """Sequence names, in order."""
        return [self.members[row].sequences[0].name for row in self.rows.tolist()]

    def entries(self) -> Iterator[tuple[int, ScheduledSequence]]:
        """(ticket, entry) of each row, in order."""
        for row, before in zip(self.rows.tolist(), self.computed_before.tolist(), strict=True):
            yield self.members[row].ticket, self._entry(row, before)

    def grown(self) -> list[ScheduledSequence]:
        """Entries of the rows that got a block, in order."""
        if not self.new_blocks:
            return []
        rows = sorted(self.new_blocks)
        before = self.computed_before[np.searchsorted(self.rows, rows)].tolist()
        return [self._entry(row, num) for row, num in zip(rows, before, strict=True)]

    def _entry(self, row: int, computed_before: int) -> ScheduledSequence:
        group = self.members[row]
        sequence = group.sequences[0]
        return ScheduledSequence(
            name=sequence.name,
            request_id=group.request.request_id,
            index=sequence.index,
            num_tokens=1,
            computed_before=computed_before,
            new_block_ids=self.new_blocks.get(row, []),
            fresh=False,
            resumed=False,
            samples=True,
            is_prefill=False,
            num_prompt_tokens=sequence.num_prompt_tokens,
        )


@dataclass(slots=True)
class FastRuns:
    """One new token for each of some rows of `members`; `positions`: its index in the sequence."""

    members: list[Group]
    rows: Ints
    positions: Ints
    token_ids: Ints

    def tickets(self) -> list[int]:
        """The ticket of each row, in order."""
        return [self.members[row].ticket for row in self.rows.tolist()]

    def runs(self) -> list[SequenceTokens]:
        """The run of each row, in order."""
        columns, runs = (self.rows.tolist(), self.positions.tolist(), self.token_ids.tolist()), []
        for row, position, token in zip(*columns, strict=True):
            group = self.members[row]
            sequence = group.sequences[0]
            offset = position - sequence.num_prompt_tokens
            runs.append(SequenceTokens(sequence.name, group.request.request_id, sequence.index, offset, [token]))
        return runs
