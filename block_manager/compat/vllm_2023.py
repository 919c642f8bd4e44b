"""Cache rules of the 2023 vLLM block manager.

Blocks are allocated one at a time, every block is found by its whole prefix, and swapping keeps sharing.
"""

from collections.abc import Iterable, Mapping, MutableMapping, Sequence
from itertools import takewhile
from typing import Self

from block_manager.cache_rules import AllocStatus, CachedSequence, Growth, Pair, PrefixHit
from block_manager.compat.allocators_2023 import Allocator, CachedAllocator, UncachedAllocator
from block_manager.compat.computed_prefix import common_length
from block_manager.compat.free_stack import FreeStack, StackThenEvictor
from block_manager.compat.prefix_keys import SplitPrefixKeys, num_cached_blocks
from block_manager.hashing import HashChain, HashRename
from block_manager.ledger import Ledger
from block_manager.pool import BlockPool


class Vllm2023Rules:
    """The 2023 rules over a ledger. They have no lookahead slots: `num_lookahead` must be 0."""

    device_pool = None
    journals_prefixes = False

    def __init__(
        self,
        ledger: Ledger,
        *,
        prefix_caching: bool,
        watermark_blocks: int,
        keeps_stale_keys: bool = False,
        rename: HashRename | None = None,
        chains: dict[str, HashChain] | None = None,
    ) -> None:
        self.ledger = ledger
        self._keeps_stale_keys = keeps_stale_keys
        self._prefix_caching = prefix_caching
        self.watermark_blocks = watermark_blocks
        self._keys = SplitPrefixKeys(ledger.block_size, enabled=prefix_caching, rename=rename, chains=chains)
        allocator = CachedAllocator if prefix_caching else UncachedAllocator
        self._gpu: Allocator = allocator(ledger.gpu)
        self._cpu: Allocator = allocator(ledger.cpu)

    @classmethod
    def make(
        cls,
        *,
        block_size: int,
        num_gpu_blocks: int,
        num_cpu_blocks: int,
        max_model_len: int,
        prefix_caching: bool,
        watermark_blocks: int | None = None,
        sliding_window: int | None = None,
        keeps_stale_keys: bool = False,
        rename: HashRename | None = None,
        chains: dict[str, HashChain] | None = None,
    ) -> Self:
        """Rules over a new ledger. `watermark_blocks` None: 1 % of the device blocks.

        `sliding_window` frees nothing: all blocks are kept, as the original's ring of blocks would overwrite a
        prompt before it is read. `keeps_stale_keys`: as in the original, a prompt's partial block is still
        found by its old contents after its sequence wrote more into it, so that a swap may copy over it.
        """
        watermark = int(0.01 * num_gpu_blocks) if watermark_blocks is None else watermark_blocks
        gpu, cpu = (_pool(n, prefix_caching=prefix_caching) for n in (num_gpu_blocks, num_cpu_blocks))
        ledger = Ledger(block_size, gpu, cpu)
        return cls(
            ledger,
            prefix_caching=prefix_caching,
            watermark_blocks=watermark,
            keeps_stale_keys=keeps_stale_keys,
            rename=rename,
            chains=chains,
        )

    @property
    def num_free_gpu(self) -> int:
        """Free device blocks, evictable ones included."""
        return self.ledger.gpu.num_free

    @property
    def num_free_cpu(self) -> int:
        """Free host blocks, evictable ones included."""
        return self.ledger.cpu.num_free

    @property
    def capacity_blocks(self) -> int:
        """Blocks that a group could be admitted with alone."""
        return max(0, self.ledger.gpu.num_blocks - self.watermark_blocks)

    @property
    def capacity_tokens(self) -> int:
        """Tokens of the longest sequence that could be admitted alone."""
        return self.capacity_blocks * self.ledger.block_size

    @property
    def hits(self) -> tuple[int, int]:
        """(allocations, hits) on the device since the start; (0, 0) without caching."""
        return self._gpu.num_queries, self._gpu.num_hits

    def resize(self, num_gpu_blocks: int, num_cpu_blocks: int) -> None:
        """Change the pool sizes. ValueError if blocks in use would be removed."""
        self.ledger.resize(num_gpu_blocks, num_cpu_blocks)
        self._gpu.fit_pool()
        self._cpu.fit_pool()

    # --- a group starts ---------------------------------------------------------------------------------------------

    def lookup(self, sequence: CachedSequence) -> PrefixHit:
        """Return an empty hit: hits save blocks here, not token budget."""
        return PrefixHit()

    def first_key(self, sequence: CachedSequence) -> bytes | None:
        """Key of its first block; None without prefix caching."""
        has_it = len(sequence.token_ids) > self.ledger.block_size and not sequence.no_cache_reuse
        return self._keys.of(sequence, 0) if has_it else None

    def num_cached_tokens(self, sequence: CachedSequence) -> int:
        """Tokens of its leading full blocks that are cached."""
        return num_cached_blocks(self._keys, sequence, self.ledger.gpu) * self.ledger.block_size

    def can_admit(
        self, sequences: Sequence[CachedSequence], hit: PrefixHit, num_new_tokens: int, num_lookahead: int = 0
    ) -> AllocStatus:
        """Whether blocks suffice, as if nothing were cached."""
        needed = self.num_blocks_to_admit(sequences, hit, num_new_tokens, num_lookahead)
        if self.ledger.gpu.num_blocks - needed < self.watermark_blocks:
            return AllocStatus.NEVER
        return AllocStatus.OK if self.num_free_gpu - needed >= self.watermark_blocks else AllocStatus.LATER

    def num_blocks_to_admit(
        self, sequences: Sequence[CachedSequence], hit: PrefixHit, num_new_tokens: int, num_lookahead: int = 0
    ) -> int:
        """Free blocks that `can_admit` requires, without the watermark."""
        assert num_lookahead == 0
        return self._num_tail_blocks(sequences, self._num_prompt_blocks(sequences))

    def admit(
        self, sequences: Sequence[CachedSequence], hit: PrefixHit, num_new_tokens: int, num_lookahead: int = 0
    ) -> None:
        """Allocate all blocks of all tables in order; the partial last block is found by its contents too.

        Other sequences share the prompt's full blocks with the first.
        """
        first, *others = sequences
        table = self._fill_table(first, [])
        for other in others:
            shared = table[: self._num_prompt_blocks(sequences)]
            self.ledger.gpu.share(shared)
            self._fill_table(other, shared)

    # --- a group continues ------------------------------------------------------------------------------------------

    def can_extend(self, sequences: Sequence[CachedSequence], num_new_tokens: int, num_lookahead: int = 0) -> bool:
        """Whether one block per sequence is free, needed or not."""
        assert num_lookahead == 0
        missing = (self.ledger.blocks_for(len(s.token_ids)) - len(self.ledger.tables[s.name]) for s in sequences)
        return sum(max(1, num) for num in missing) <= self.num_free_gpu

    def fits_exactly(self, sequences: Sequence[CachedSequence], num_new_tokens: int, num_lookahead: int = 0) -> bool:
        """Whether blocks are free for what each table lacks, and for each last block that is shared."""
        tables = [(self.ledger.blocks_for(len(s.token_ids)), self.ledger.tables[s.name]) for s in sequences]
        num_taken = sum(goal - len(table) or self.ledger.gpu.refs[table[-1]] > 1 for goal, table in tables)
        return num_taken <= self.num_free_gpu

    def extend(self, sequence: CachedSequence, num_new_tokens: int, num_lookahead: int = 0) -> Growth:
        """Append blocks if the table is short; otherwise copy the last block if shared, or promote it if full."""
        table = self.ledger.tables[sequence.name]
        goal = self.ledger.blocks_for(len(sequence.token_ids))
        added = [self._new_block(sequence, i) for i in range(len(table), goal)]
        if added:
            table += added
            return Growth(added)
        last = table[-1]
        if self.ledger.gpu.refs[last] > 1:
            table[-1] = self._new_block(sequence, len(table) - 1)
            self._gpu.release(last)
            return Growth(copies=[(last, table[-1])], rewritten=True)
        key = self._full_key(sequence, len(table) - 1)
        if key is not None:
            table[-1] = self._gpu.promote(last, key)
        elif not self._keeps_stale_keys:
            self._gpu.retract([last])
        return Growth(rewritten=table[-1] != last)

    def fork(self, parent: CachedSequence, child: CachedSequence) -> None:
        """Let the child share all blocks of its parent; no-op if the parent has no table."""
        if parent.name in self.ledger.tables:
            table = self.ledger.tables[child.name] = list(self.ledger.tables[parent.name])
            self.ledger.gpu.share(table)

    def commit(self, sequences: Iterable[CachedSequence], now: float) -> None:
        """Set the blocks' access time to `now`, and count those full after this step as computed."""
        if not self._prefix_caching:
            return
        for sequence in sequences:
            table = self.ledger.tables[sequence.name]
            for block in table:
                self.ledger.gpu.last_accessed[block] = now
            self._mark_computed(table, sequence.num_computed_tokens + sequence.num_scheduled_tokens)

    def num_computed_blocks(self, sequences: Sequence[CachedSequence]) -> int:
        """Common leading computed blocks of the sequences that have any; never the last block of a table."""
        tables = (self.ledger.tables[s.name][:-1] for s in sequences)
        found = [list(takewhile(self._gpu.is_computed, table)) for table in tables]
        return common_length([blocks for blocks in found if blocks])

    def num_common_prefix_blocks(self, sequences: Sequence[CachedSequence]) -> int:
        """Leading blocks of the first sequence that every table holds; 0 when caching is off."""
        if not self._prefix_caching or not sequences:
            return 0
        table = self.ledger.tables.get(sequences[0].name, [])
        own = (i for i, block in enumerate(table) if self.ledger.gpu.refs[block] != len(self.ledger.tables))
        return next(own, len(table))

    def commit_sampled(self, sequence: CachedSequence) -> None:
        """No-op: a block gets its key when it is allocated or full."""

    def retract(self, sequence: CachedSequence, num_computed_tokens: int) -> None:
        """Unregister its blocks from that token offset on; they are not computed. No-op if it is not on the device."""
        first = num_computed_tokens // self.ledger.block_size
        self._gpu.retract(self.ledger.tables.get(sequence.name, [])[first:])

    # --- a group moves between device and host ----------------------------------------------------------------------

    def can_swap_out(self, sequences: Sequence[CachedSequence]) -> bool:
        """Whether the host has a block for each distinct block."""
        return _num_distinct(self.ledger.tables, sequences) <= self.num_free_cpu

    def swap_out(self, sequences: Sequence[CachedSequence]) -> list[Pair]:
        """Move each distinct block to one host block."""
        return _move(sequences, self.ledger.tables, self._gpu, self.ledger.host_tables, self._cpu)

    def can_swap_in(self, sequences: Sequence[CachedSequence], num_lookahead: int = 0) -> AllocStatus:
        """Whether the device has a block for each distinct block, one more per sequence, and the watermark.

        The watermark is waived on an idle device: a group that fits only without it would wait forever.
        """
        needed, total = self.num_blocks_to_swap_in(sequences, num_lookahead), self.ledger.gpu.num_blocks
        if needed > total:
            return AllocStatus.NEVER
        fits = self.num_free_gpu == total or self.num_free_gpu - needed >= self.watermark_blocks
        return AllocStatus.OK if fits else AllocStatus.LATER

    def num_blocks_to_swap_in(self, sequences: Sequence[CachedSequence], num_lookahead: int = 0) -> int:
        """Device blocks that `can_swap_in` requires, without the watermark."""
        assert num_lookahead == 0
        return _num_distinct(self.ledger.host_tables, sequences) + len(sequences)

    def swap_in(self, sequences: Sequence[CachedSequence]) -> list[Pair]:
        """Move each distinct block to one device block, or to a cached one with the same contents."""
        return _move(sequences, self.ledger.host_tables, self._cpu, self.ledger.tables, self._gpu)

    # --- a sequence ends --------------------------------------------------------------------------------------------

    def release(self, sequence: CachedSequence) -> None:
        """Free its blocks, first to last, on either device; no-op without a table."""
        self.ledger.gpu.release(self.ledger.tables.pop(sequence.name, []))
        self.ledger.cpu.release(self.ledger.host_tables.pop(sequence.name, []))

    def forget(self, sequence: CachedSequence) -> None:
        """Drop its block keys."""
        self._keys.forget(sequence.name)

    def reset_prefixes(self) -> None:
        """Drop all cached contents on both devices."""
        self._gpu.reset()
        self._cpu.reset()

    # --- internals --------------------------------------------------------------------------------------------------

    def _num_prompt_blocks(self, sequences: Sequence[CachedSequence]) -> int:
        return sequences[0].num_prompt_tokens // self.ledger.block_size

    def _num_tail_blocks(self, sequences: Sequence[CachedSequence], num_shared: int) -> int:
        return num_shared + sum(self.ledger.blocks_for(len(s.token_ids)) - num_shared for s in sequences)

    def _fill_table(self, sequence: CachedSequence, shared: list[int]) -> list[int]:
        """Create the table of a sequence; its first blocks are `shared`."""
        table = self.ledger.tables[sequence.name] = list(shared)
        for i in range(len(shared), self.ledger.blocks_for(len(sequence.token_ids))):
            table.append(self._gpu.allocate(self._keys.of(sequence, i), (i + 1) * self.ledger.block_size))
        return table

    def _full_key(self, sequence: CachedSequence, i: int) -> bytes | None:
        """Key of its block `i`; None while that is not full."""
        is_full = (i + 1) * self.ledger.block_size <= len(sequence.token_ids)
        return self._keys.of(sequence, i) if is_full else None

    def _new_block(self, sequence: CachedSequence, i: int) -> int:
        """Allocate its block `i`, private unless it is full already."""
        return self._gpu.allocate(self._full_key(sequence, i), (i + 1) * self.ledger.block_size)

    def _mark_computed(self, table: list[int], num_tokens: int) -> None:
        full = min(num_tokens // self.ledger.block_size, len(table))
        for block in takewhile(lambda b: not self._gpu.is_computed(b), reversed(table[:full])):
            self._gpu.mark_computed(block)


def _num_distinct(tables: Mapping[str, Sequence[int]], sequences: Sequence[CachedSequence]) -> int:
    return len({block for s in sequences for block in tables[s.name]})


def _move(
    sequences: Sequence[CachedSequence],
    tables: MutableMapping[str, list[int]],
    source: Allocator,
    target_tables: MutableMapping[str, list[int]],
    target: Allocator,
) -> list[Pair]:
    """Move block by block: the first occurrence allocates a target, later ones share it; each table releases its
    sources.
    """
    moved: dict[int, int] = {}
    for sequence in sequences:
        table = tables.pop(sequence.name)
        for block in table:
            if block in moved:
                target.pool.share([moved[block]])
            else:
                moved[block] = target.allocate(source.pool.hash_of[block], source.pool.num_hashed_tokens[block])
            source.release(block)
        target_tables[sequence.name] = [moved[block] for block in table]
    return list(moved.items())


def _pool(num_blocks: int, *, prefix_caching: bool) -> BlockPool:
    """Free order: uncached, highest id first, then last freed; cached, ascending ids first, then the evictor."""
    if prefix_caching:
        return BlockPool(num_blocks, free_blocks=StackThenEvictor(reversed(range(num_blocks)), keep_all=True))
    return BlockPool(num_blocks, free_blocks=FreeStack(range(num_blocks)))
