"""Swap as in vLLM 0.6.3: each sequence separately, so sharing survives only for blocks found by contents."""

from collections.abc import Sequence

from block_manager.cache_rules import AllocStatus, CachedSequence, Pair
from block_manager.compat.allocator_063 import FullBlockAllocator
from block_manager.compat.sliding_window import SlidingWindow
from block_manager.compat.table_extent import Written
from block_manager.ledger import Ledger

Tables = dict[str, list[int]]


class Swap063:
    """Moves tables between device and host. Host tables omit the blocks dropped by a sliding window."""

    def __init__(
        self,
        ledger: Ledger,
        device: FullBlockAllocator,
        host: FullBlockAllocator,
        written: dict[str, Written],
        window: SlidingWindow | None,
    ) -> None:
        self._ledger = ledger
        self._device = device
        self._host = host
        self._written = written
        self._window = window

    def fit_pools(self) -> None:
        """Adjust to changed pool sizes."""
        self._device.fit_pool()
        self._host.fit_pool()

    def can_leave(self, sequences: Sequence[CachedSequence]) -> bool:
        """Whether the host has room."""
        tables = [self._ledger.tables[s.name][self._written[s.name].num_dropped :] for s in sequences]
        touched, needed = self._count(sequences, tables, self._device, self._host, 0)
        return max(touched, needed) <= self._host.pool.num_free

    def can_return(self, sequences: Sequence[CachedSequence], watermark_blocks: int, num_lookahead: int) -> AllocStatus:
        """Whether the device has room for their blocks and what they append next.

        The watermark protects running groups; it is waived on an idle device, where a group that fits only
        without it would wait forever.
        """
        touched, needed = self.count_return(sequences, num_lookahead)
        pool = self._device.pool
        if max(touched, needed) > pool.num_usable:
            return AllocStatus.NEVER
        is_idle = pool.num_free == pool.num_usable
        fits = is_idle or (pool.num_free - touched >= watermark_blocks and needed <= pool.num_free)
        return AllocStatus.OK if fits else AllocStatus.LATER

    def count_return(self, sequences: Sequence[CachedSequence], num_lookahead: int) -> tuple[int, int]:
        """Device blocks by vLLM's count, which must leave the watermark free, and blocks really taken."""
        tables = [self._ledger.host_tables[s.name] for s in sequences]
        touched, needed = self._count(sequences, tables, self._host, self._device, num_lookahead)
        return touched, needed + (self._window.num_missing if self._window else 0)

    def leave(self, sequences: Sequence[CachedSequence]) -> list[Pair]:
        """Move tables from device to host."""
        pairs: list[Pair] = []
        for sequence in sequences:
            blocks = self._ledger.tables.pop(sequence.name)[self._written[sequence.name].num_dropped :]
            moved = self._move(sequence, blocks, self._device, self._host)
            self._ledger.host_tables[sequence.name] = moved
            pairs += zip(blocks, moved, strict=True)
        return pairs

    def come_back(self, sequences: Sequence[CachedSequence]) -> list[Pair]:
        """Move tables from host to device."""
        pairs: list[Pair] = []
        for sequence in sequences:
            blocks = self._ledger.host_tables.pop(sequence.name)
            moved = self._move(sequence, blocks, self._host, self._device)
            dropped = self._window.placeholders(self._written[sequence.name].num_dropped) if self._window else []
            self._ledger.tables[sequence.name] = dropped + moved
            pairs += zip(blocks, moved, strict=True)
        return pairs

    def _num_full(self, sequence: CachedSequence) -> int:
        written = self._written[sequence.name]
        return written.num_tokens // self._ledger.block_size - written.num_dropped

    def _move(
        self, sequence: CachedSequence, blocks: list[int], source: FullBlockAllocator, target: FullBlockAllocator
    ) -> list[int]:
        """Release all source blocks, then allocate the targets in order, full ones by contents."""
        written, num_full = self._written[sequence.name], self._num_full(sequence)
        keys = [source.pool.hash_of[block] for block in blocks]
        source.pool.release(blocks)
        moved = []
        for i, key in enumerate(keys):
            num_hashed_tokens = (written.num_dropped + i + 1) * self._ledger.block_size
            moved.append(target.allocate_full(key if i < num_full else None, num_hashed_tokens))
        return moved

    def _count(
        self,
        sequences: Sequence[CachedSequence],
        tables: Sequence[list[int]],
        source: FullBlockAllocator,
        target: FullBlockAllocator,
        num_lookahead: int,
    ) -> tuple[int, int]:
        """(blocks touched by vLLM's count, blocks really taken; the latter can be more because of spare lookahead
        blocks).
        """
        touched = needed = 0
        keys: list[bytes | None] = []
        for sequence, table in zip(sequences, tables, strict=True):
            written, num_full = self._written[sequence.name], self._num_full(sequence)
            touched += written.num_touched(sequence, self._ledger.block_size, num_lookahead)
            goal = self._ledger.blocks_for(len(sequence.token_ids) + num_lookahead) - written.num_dropped
            needed += max(len(table), goal) - num_full
            keys += [source.pool.hash_of[block] for block in table[:num_full]]
        return touched + target.num_touched_by(keys), needed + target.num_taken_by(keys)
