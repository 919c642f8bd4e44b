"""Blocks appended to the tables of several cache groups, one of each group at a time (fast decode)."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, Self, TypeVar

from block_manager.cache_rules import CachedSequence
from block_manager.ledger import Ledger
from block_manager.rules.pool_rules import PoolRules
from block_manager.rules.prefix_book import TableEnd
from block_manager.rules.state_tables import StateTables
from block_manager.rules.v1_rules import V1PoolRules

Rules = TypeVar("Rules", bound=V1PoolRules)


@dataclass(frozen=True, slots=True)
class GroupedEnd:
    """The ends of a live sequence's tables, of each group one; all are equally long."""

    of_groups: list[TableEnd]
    num_state_blocks: int

    @property
    def num_held(self) -> int:
        """Blocks of all groups and of states, without null blocks."""
        return sum(end.num_held for end in self.of_groups) + self.num_state_blocks

    @property
    def table(self) -> list[int]:
        """The table of the first group."""
        return self.of_groups[0].table


class GroupedEnds(PoolRules, Generic[Rules]):
    """Base of the rules of several groups: what fast decode asks of them."""

    def __init__(self, ledger: Ledger, groups: Sequence[Rules], states: StateTables, watermark_blocks: int) -> None:
        """See `GroupedRules`."""
        super().__init__(ledger, watermark_blocks)
        self._groups = list(groups)
        self._states = states

    @property
    def fast_pool(self) -> Self:
        """These rules."""
        return self

    @property
    def checkpoint_tokens(self) -> int:
        """See `StateTables.checkpoint_tokens`."""
        return self._states.checkpoint_tokens

    def append_blocks(self, ends: Sequence[GroupedEnd]) -> list[list[int]]:
        """Append one block of each group to each of these tables, in order."""
        step = len(self._groups)
        blocks = self._pool.allocate(step * len(ends))
        added = [blocks[at : at + step] for at in range(0, len(blocks), step)]
        for end, own in zip(ends, added, strict=True):
            for one, block in zip(end.of_groups, own, strict=True):
                one.table.append(block)
        return added

    def register(self, sequence: CachedSequence, num_tokens: int) -> int:
        """Register full blocks among the first `num_tokens` tokens in all groups; returns the length at which the next
        blocks are full.
        """
        return min([rules.register(sequence, num_tokens) for rules in self._groups])

    def open_end(self, sequence: CachedSequence) -> GroupedEnd:
        """The ends of its tables, in which equally many blocks are registered."""
        ends = [rules.open_end(sequence) for rules in self._groups]
        assert ends[0].chain is None or len({end.num_registered for end in ends}) == 1
        return GroupedEnd(ends, self._states.num_blocks)

    def register_blocks(self, ends: Sequence[GroupedEnd], data: bytes) -> None:
        """Register the next blocks of each sequence, filled with `data`: little-endian int32 [ends, block_size]."""
        hashes = self._groups[0].next_hashes([end.of_groups[0] for end in ends], data)
        for number, rules in enumerate(self._groups):
            rules.register_next([end.of_groups[number] for end in ends], hashes)

    def has_unnamed_checkpoint(self, sequence: CachedSequence) -> bool:
        """See `StateTables.has_unnamed`."""
        return self._states.has_unnamed(sequence)
