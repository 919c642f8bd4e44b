"""Quire's own cache rules: those of V1, plus swapping of groups that keeps their sharing."""

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any, Self

from block_manager.cache_rules import AllocStatus, CachedSequence, Pair
from block_manager.ledger import Ledger
from block_manager.pool import BlockPool
from block_manager.rules.cache_groups import NULL, num_leading
from block_manager.rules.pool_rules import PoolRules
from block_manager.rules.v1_rules import V1PoolRules

_WATERMARK = 0.01
_NOWHERE = -1


def watermark_for(num_gpu_blocks: int) -> int:
    """Default watermark of a pool: 1 % of its blocks."""
    return int(_WATERMARK * num_gpu_blocks)


class SwapNeeds(PoolRules):
    """Rules that say what they need to be swapped in."""

    @abstractmethod
    def count_return(self, sequences: Sequence[CachedSequence], num_lookahead: int) -> tuple[int, int, int]:
        """Blocks to allocate, cached blocks that the device still has, and how many of the latter are free."""

    def can_swap_in(self, sequences: Sequence[CachedSequence], num_lookahead: int = 0) -> AllocStatus:
        """Whether the device has room for all their tokens, counting blocks that it still caches."""
        num_new, num_reused, num_revived = self.count_return(sequences, num_lookahead)
        if num_new + num_reused > self._pool.num_usable:
            return AllocStatus.NEVER
        return self._when(num_new + num_revived)

    def num_blocks_to_swap_in(self, sequences: Sequence[CachedSequence], num_lookahead: int = 0) -> int:
        """Device blocks that `can_swap_in` requires, without the watermark."""
        num_new, _, num_revived = self.count_return(sequences, num_lookahead)
        return num_new + num_revived


class QuireRules(V1PoolRules, SwapNeeds):
    """V1's rules with swap and a watermark. Block needs are exact, never estimates.

    `watermark_blocks` stay free when a group starts or is swapped in, so that it is not preempted at once;
    waived on an empty device, where no other group could need them, so it makes no answer NEVER.
    """

    def __init__(self, ledger: Ledger, **values: Any) -> None:
        """`values`: those of V1's rules."""
        super().__init__(ledger, **values)
        self._host_null = NULL if NULL in ledger.cpu.reserved else _NOWHERE

    @classmethod
    def make(
        cls,
        *,
        block_size: int,
        num_gpu_blocks: int,
        num_cpu_blocks: int,
        watermark_blocks: int | None = None,
        window: int | None = None,
        **values: Any,
    ) -> Self:
        """Rules over a new ledger. `watermark_blocks`: None = `watermark_for` the pool.

        `window`: of a sliding window, for which tables may contain null blocks; one host block stands for them while
        they are swapped out. `values`: the other ones of V1's rules.
        """
        if watermark_blocks is None:
            watermark_blocks = watermark_for(num_gpu_blocks)
        cpu = BlockPool(num_cpu_blocks, num_reserved=int(window is not None))
        ledger = Ledger(block_size, gpu=BlockPool(num_gpu_blocks, num_reserved=1), cpu=cpu)
        return cls(ledger, watermark_blocks=watermark_blocks, window=window, **values)

    def can_swap_out(self, sequences: Sequence[CachedSequence]) -> bool:
        """Whether the host has room for their distinct blocks."""
        tables = [self.ledger.tables[s.name] for s in sequences]
        if self._host_null == _NOWHERE and any(num_leading(NULL, table) for table in tables):
            return False
        return self.num_to_swap_out(sequences) <= self.ledger.cpu.num_free

    def num_to_swap_out(self, sequences: Sequence[CachedSequence]) -> int:
        """Host blocks for their distinct blocks."""
        return len(_distinct([self.ledger.tables[s.name] for s in sequences], NULL))

    def swap_out(self, sequences: Sequence[CachedSequence]) -> list[Pair]:
        """Move all their blocks to the host, a shared one once. The device blocks stay cached until they are reused."""
        placed = {NULL: self._host_null}
        for sequence in sequences:
            table = self.ledger.tables[sequence.name]
            self.ledger.host_tables[sequence.name] = [self.ledger.cpu.place(block, placed) for block in table]
        for sequence in sequences:
            super().release(sequence)
        return list(placed.items())[1:]

    def count_return(self, sequences: Sequence[CachedSequence], num_lookahead: int) -> tuple[int, int, int]:
        """See `SwapNeeds`."""
        host = self.ledger.host_tables
        num_appended = self._num_to_reach(
            [(s, host[s.name], len(s.token_ids) + s.num_placeholders + num_lookahead) for s in sequences],
            self.ledger.cpu.refs,
        )
        tables = [host[s.name] for s in sequences]
        kept = self._kept(sequences, tables)
        reused = dict.fromkeys(kept.values())
        num_new = len(_distinct(tables, self._host_null)) - len(kept) + num_appended
        return num_new, len(reused), sum(self._pool.refs[block] == 0 for block in reused)

    def swap_in(self, sequences: Sequence[CachedSequence]) -> list[Pair]:
        """Move all their blocks back, a shared one once. Full blocks that the device still caches need no copy."""
        return self.move_in(sequences, self.keep_cached(sequences))

    def keep_cached(self, sequences: Sequence[CachedSequence]) -> dict[int, int]:
        """Reference the blocks that the device still caches, before any allocation overwrites those that are free.
        Returns them by host block.
        """
        tables = [self.ledger.host_tables[s.name] for s in sequences]
        kept = self._kept(sequences, tables)
        for table in tables:
            self._pool.share(kept[block] for block in table if block in kept)
        return kept

    def move_in(self, sequences: Sequence[CachedSequence], kept: dict[int, int]) -> list[Pair]:
        """Move in all but what `keep_cached` gave; returns the pairs of `swap_in`."""
        placed = {self._host_null: NULL}
        for sequence in sequences:
            table = self.ledger.host_tables.pop(sequence.name)
            self.ledger.tables[sequence.name] = [
                kept[block] if block in kept else self._pool.place(block, placed) for block in table
            ]
            self.ledger.cpu.release(reversed(table))
            self._prefixes.open(sequence, num_leading(self._host_null, table))
            self._prefixes.reserve(sequence, _num_sure_tokens(sequence))
        return list(placed.items())[1:]

    def fork(self, parent: CachedSequence, child: CachedSequence) -> None:
        """Let the child share all blocks of its parent, on the host if a late result forks a swapped sequence."""
        if parent.name in self.ledger.host_tables:
            table = self.ledger.host_tables[child.name] = list(self.ledger.host_tables[parent.name])
            self.ledger.cpu.share(table)
        else:
            super().fork(parent, child)

    def release(self, sequence: CachedSequence) -> None:
        """Free its blocks, on either device."""
        self.ledger.cpu.release(reversed(self.ledger.host_tables.pop(sequence.name, [])))
        super().release(sequence)

    # --- internals ----------------------------------------------------------------------------------------------------

    def _kept(self, sequences: Sequence[CachedSequence], tables: list[list[int]]) -> dict[int, int]:
        """Host blocks with contents that the device still caches: full blocks with a registered hash."""
        kept: dict[int, int] = {}
        for sequence, table in zip(sequences, tables, strict=True):
            for block, device_block in zip(
                table, self._prefixes.find_all(sequence, _num_sure_tokens(sequence)), strict=False
            ):
                if device_block is not None and block != self._host_null:
                    kept[block] = device_block
        return kept


def _num_sure_tokens(sequence: CachedSequence) -> int:
    return max(0, sequence.num_computed_tokens - sequence.num_placeholders)


def _distinct(tables: list[list[int]], null: int) -> set[int]:
    return {block for table in tables for block in table} - {null}
