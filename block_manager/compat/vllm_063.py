"""Cache rules of vLLM 0.6.3: full blocks are found by contents, and groups are swapped sequence by sequence.

Needs are counted from the tokens not yet in a table. Three defects of the original are repaired: the remaining
sequence of a group is prefilled again after preemption, victims of priority preemption with several samples are
not lost, and aborting a swapped group works with prefix caching.
"""

from collections.abc import Iterable, Sequence
from typing import Self

from block_manager.cache_rules import AllocStatus, CachedSequence, Growth, Pair, PrefixHit
from block_manager.compat.allocator_063 import FullBlockAllocator
from block_manager.compat.computed_prefix import common_length
from block_manager.compat.free_stack import FreeStack, StackThenEvictor
from block_manager.compat.prefix_keys import num_cached_blocks
from block_manager.compat.sliding_window import SlidingWindow
from block_manager.compat.swap_063 import Swap063
from block_manager.compat.table_extent import Written
from block_manager.compat.tables_063 import Tables063
from block_manager.hashing import HashChain, HashRename
from block_manager.ledger import Ledger
from block_manager.pool import BlockPool


class Vllm063Rules:
    """The rules of 0.6.3 over a ledger. `num_new_tokens` is ignored: the tokens not yet in the table count."""

    device_pool = None
    journals_prefixes = False

    def __init__(
        self,
        ledger: Ledger,
        *,
        prefix_caching: bool,
        watermark_blocks: int,
        sliding_window: int | None = None,
        exact_window: bool = False,
        counts_whole_prompts: bool = False,
        rename: HashRename | None = None,
        chains: dict[str, HashChain] | None = None,
    ) -> None:
        self.ledger = ledger
        self._prefix_caching = prefix_caching
        self.watermark_blocks = watermark_blocks
        self._counts_whole_prompts = counts_whole_prompts
        self._blocks = FullBlockAllocator(ledger.gpu)
        self._window = None if sliding_window is None else SlidingWindow(ledger, sliding_window, exact=exact_window)
        self._written: dict[str, Written] = {}
        self._chunked: dict[str, int] = {}
        self._tables = Tables063(
            ledger,
            self._blocks,
            self._written,
            self._window,
            prefix_caching=prefix_caching,
            rename=rename,
            chains=chains,
        )
        self._swap = Swap063(ledger, self._blocks, FullBlockAllocator(ledger.cpu), self._written, self._window)

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
        exact_window: bool = False,
        counts_whole_prompts: bool = False,
        rename: HashRename | None = None,
        chains: dict[str, HashChain] | None = None,
    ) -> Self:
        """Rules over a new ledger. `watermark_blocks` None: 1 % of the device blocks.

        `sliding_window` in tokens; `exact_window`: see `SlidingWindow`. `counts_whole_prompts`: all blocks of a
        chunked prompt count as computed with its first chunk, as in the original.
        """
        watermark = int(0.01 * num_gpu_blocks) if watermark_blocks is None else watermark_blocks
        gpu, cpu = (_pool(n, prefix_caching=prefix_caching) for n in (num_gpu_blocks, num_cpu_blocks))
        return cls(
            Ledger(block_size, gpu, cpu),
            prefix_caching=prefix_caching,
            watermark_blocks=watermark,
            sliding_window=sliding_window,
            exact_window=exact_window,
            counts_whole_prompts=counts_whole_prompts,
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
        """Blocks that a group could be admitted with alone, without the null block of a sliding window."""
        null = int(self._window is not None)
        return max(0, self.ledger.gpu.num_blocks - self.watermark_blocks - null)

    @property
    def capacity_tokens(self) -> int:
        """Tokens of the longest sequence that could be admitted alone."""
        return self.capacity_blocks * self.ledger.block_size

    @property
    def hits(self) -> tuple[int, int]:
        """(lookups, hits) of full blocks on the device, those of swap-ins included."""
        return self._blocks.num_queries, self._blocks.num_hits

    def resize(self, num_gpu_blocks: int, num_cpu_blocks: int) -> None:
        """Change the pool sizes. ValueError if blocks in use would be removed."""
        self.ledger.resize(num_gpu_blocks, num_cpu_blocks)
        self._blocks.fit_pool()
        self._swap.fit_pools()

    # --- a group starts ---------------------------------------------------------------------------------------------

    def lookup(self, sequence: CachedSequence) -> PrefixHit:
        """Return an empty hit: hits save blocks here, not token budget."""
        return PrefixHit()

    def first_key(self, sequence: CachedSequence) -> bytes | None:
        """Key of its first block; None without prefix caching."""
        has_it = len(sequence.token_ids) > self.ledger.block_size and not sequence.no_cache_reuse
        return self._tables.keys.of(sequence, 0) if has_it else None

    def num_cached_tokens(self, sequence: CachedSequence) -> int:
        """Tokens of its leading full blocks that are cached."""
        return num_cached_blocks(self._tables.keys, sequence, self.ledger.gpu) * self.ledger.block_size

    def can_admit(
        self, sequences: Sequence[CachedSequence], hit: PrefixHit, num_new_tokens: int, num_lookahead: int = 0
    ) -> AllocStatus:
        """Whether blocks suffice, as if nothing were cached.

        With a sliding window both vLLM's count and the real need must fit. On an idle device only the real need
        counts, as the null block may permanently use up part of the watermark. A null block that is still to be
        taken concerns `can_extend` only: starting needs none.
        """
        pool = self.ledger.gpu
        counted, taken = self._count_start(sequences, num_lookahead)
        if pool.num_blocks - counted < self.watermark_blocks or taken + bool(self._window) > pool.num_blocks:
            return AllocStatus.NEVER
        is_idle = pool.num_free == pool.num_usable
        if (is_idle or pool.num_free - counted >= self.watermark_blocks) and taken <= pool.num_free:
            return AllocStatus.OK
        return AllocStatus.LATER

    def num_blocks_to_admit(
        self, sequences: Sequence[CachedSequence], hit: PrefixHit, num_new_tokens: int, num_lookahead: int = 0
    ) -> int:
        """Free blocks that `can_admit` requires, without the watermark."""
        counted, taken = self._count_start(sequences, num_lookahead)
        return max(counted, taken - self.watermark_blocks)

    def _count_start(self, sequences: Sequence[CachedSequence], num_lookahead: int) -> tuple[int, int]:
        """Blocks by vLLM's count, which must leave the watermark free, and blocks really taken."""
        first = self.ledger.blocks_for(len(sequences[0].token_ids) + num_lookahead)
        counted = (min(first, self._window.num_blocks) if self._window else first) + self._num_tails(sequences)
        return counted, self.ledger.blocks_for(len(sequences[0].token_ids)) + self._num_tails(sequences)

    def admit(
        self, sequences: Sequence[CachedSequence], hit: PrefixHit, num_new_tokens: int, num_lookahead: int = 0
    ) -> None:
        """Allocate all blocks in order, full ones by contents; other sequences share the prompt's full blocks."""
        first, *others = sequences
        table = self._tables.fill(first, [])
        for other in others:
            shared = table[: self._num_prompt_blocks(sequences)]
            self.ledger.gpu.share(shared)
            self._tables.fill(other, shared)

    # --- a group continues ------------------------------------------------------------------------------------------

    def num_touched(self, sequence: CachedSequence, num_lookahead: int = 0) -> int:
        """Blocks that its next append may write to, new or not: the worst case of what it takes."""
        return self._written[sequence.name].num_touched(sequence, self.ledger.block_size, num_lookahead)

    def can_extend(self, sequences: Sequence[CachedSequence], num_new_tokens: int, num_lookahead: int = 0) -> bool:
        """Whether the blocks touched do not exceed the free ones. No watermark."""
        if sum(self.num_touched(s, num_lookahead) for s in sequences) > self.ledger.gpu.num_free:
            return False
        return not (self._window and self._window.num_missing) or self._null_fits(sequences, num_lookahead)

    def fits_exactly(self, sequences: Sequence[CachedSequence], num_new_tokens: int, num_lookahead: int = 0) -> bool:
        """Whether the blocks really taken do not exceed the free ones: a partial last block with room counts nothing."""
        if self._window:
            return self._null_fits(sequences, num_lookahead)
        num_taken = sum(
            self._written[s.name].num_taken(
                s, self.ledger.tables[s.name], self.ledger.gpu.refs, self.ledger.block_size, num_lookahead
            )
            for s in sequences
        )
        return num_taken <= self.ledger.gpu.num_free

    def extend(self, sequence: CachedSequence, num_new_tokens: int, num_lookahead: int = 0) -> Growth:
        """Write the unwritten tokens into the table, with `num_lookahead` slots behind them."""
        return self._tables.extend(sequence, num_lookahead)

    def fork(self, parent: CachedSequence, child: CachedSequence) -> None:
        """Let the child share all blocks of its parent; no-op if the parent has no table."""
        self._tables.fork(parent, child)

    def commit(self, sequences: Iterable[CachedSequence], now: float) -> None:
        """Count registered blocks as computed, and record `now` as access time, written to the blocks when they
        are freed.

        Of a chunked prompt only the blocks of its chunks so far count, unless `counts_whole_prompts`.
        """
        if self._prefix_caching:
            for sequence in sequences:
                self._written[sequence.name].last_accessed = now
                self._note_chunk(sequence)
            self._blocks.mark_computed(but=[block for name in self._chunked for block in self._unfilled(name)])

    def num_computed_blocks(self, sequences: Sequence[CachedSequence]) -> int:
        """Common leading computed blocks, cached per sequence; call once per group and step, before `commit`."""
        if not self._prefix_caching:
            return 0
        found = [self._computed_prefix(sequence) for sequence in sequences]
        return len(found[0]) if len(found) == 1 else common_length([blocks for blocks in found if blocks])

    def num_common_prefix_blocks(self, sequences: Sequence[CachedSequence]) -> int:
        """Leading blocks of the first sequence that every table holds; 0 when caching is off."""
        if not self._prefix_caching or not sequences:
            return 0
        table = self.ledger.tables.get(sequences[0].name, [])
        own = (i for i, block in enumerate(table) if self.ledger.gpu.refs[block] != len(self.ledger.tables))
        return next(own, len(table))

    def commit_sampled(self, sequence: CachedSequence) -> None:
        """No-op: blocks are registered when their tokens are written."""

    def retract(self, sequence: CachedSequence, num_computed_tokens: int) -> None:
        """Unregister its blocks from that token offset on; they are not computed. No-op if it is not on the device."""
        if sequence.name in self.ledger.tables:
            first = num_computed_tokens // self.ledger.block_size
            self._blocks.retract(self.ledger.tables[sequence.name][first:])
            self._written[sequence.name].computed.cut(first)

    # --- a group moves between device and host ----------------------------------------------------------------------

    def can_swap_out(self, sequences: Sequence[CachedSequence]) -> bool:
        """Whether the host has room; no watermark."""
        return self._swap.can_leave(sequences)

    def swap_out(self, sequences: Sequence[CachedSequence]) -> list[Pair]:
        """Move tables sequence by sequence: a shared block without a key becomes several. Unfilled blocks are
        unregistered.
        """
        for name in [s.name for s in sequences if s.name in self._chunked]:
            self._blocks.retract([block for block in self._unfilled(name) if self._blocks.is_touched(block)])
            del self._chunked[name]
        return self._swap.leave(sequences)

    def can_swap_in(self, sequences: Sequence[CachedSequence], num_lookahead: int = 0) -> AllocStatus:
        """Whether the device has room above the watermark."""
        return self._swap.can_return(sequences, self.watermark_blocks, num_lookahead)

    def num_blocks_to_swap_in(self, sequences: Sequence[CachedSequence], num_lookahead: int = 0) -> int:
        """Device blocks that `can_swap_in` requires, without the watermark."""
        touched, needed = self._swap.count_return(sequences, num_lookahead)
        return max(touched, needed - self.watermark_blocks)

    def swap_in(self, sequences: Sequence[CachedSequence]) -> list[Pair]:
        """Move tables back sequence by sequence; full blocks cached on the device are shared."""
        return self._swap.come_back(sequences)

    # --- a sequence ends --------------------------------------------------------------------------------------------

    def release(self, sequence: CachedSequence) -> None:
        """Free its blocks, first to last, on either device; access times are kept for device blocks only."""
        written = self._written.pop(sequence.name, None)
        if written is None:
            return
        self.ledger.cpu.release(self.ledger.host_tables.pop(sequence.name, []))
        blocks = self.ledger.tables.pop(sequence.name, [])[written.num_dropped :]
        if written.last_accessed is not None:
            for block in blocks:
                self.ledger.gpu.last_accessed[block] = written.last_accessed
        if self._chunked.pop(sequence.name, None) is None:
            self.ledger.gpu.release(blocks)
        else:
            self._blocks.release_unfilled(blocks)

    def forget(self, sequence: CachedSequence) -> None:
        """Drop its block keys."""
        self._tables.forget(sequence.name)

    def reset_prefixes(self) -> None:
        """Drop all cached contents on both devices."""
        self._blocks.reset()
        self.ledger.cpu.reset_prefixes()

    # --- internals --------------------------------------------------------------------------------------------------

    def _note_chunk(self, sequence: CachedSequence) -> None:
        num_filled = (sequence.num_computed_tokens + sequence.num_scheduled_tokens) // self.ledger.block_size
        if num_filled < len(sequence.token_ids) // self.ledger.block_size and not self._counts_whole_prompts:
            self._chunked[sequence.name] = num_filled
        else:
            self._chunked.pop(sequence.name, None)

    def _unfilled(self, name: str) -> list[int]:
        """Blocks of a chunked prompt that no step has filled yet."""
        return self.ledger.tables[name][self._chunked[name] :]

    def _num_prompt_blocks(self, sequences: Sequence[CachedSequence]) -> int:
        return sequences[0].num_prompt_tokens // self.ledger.block_size

    def _num_tails(self, sequences: Sequence[CachedSequence]) -> int:
        shared = self._num_prompt_blocks(sequences)
        return sum(self.ledger.blocks_for(len(s.token_ids)) - shared for s in sequences[1:])

    def _computed_prefix(self, sequence: CachedSequence) -> list[int]:
        table = self.ledger.tables[sequence.name]
        return self._written[sequence.name].computed.grow(table, self._blocks.is_computed)

    def _null_fits(self, sequences: Sequence[CachedSequence], num_lookahead: int) -> bool:
        """Whether they fit when the null block must be taken first; exact, in the order in which `extend` takes
        blocks.
        """
        assert self._window is not None
        refs, free = self.ledger.gpu.refs, self.ledger.gpu.num_free - self._window.num_missing
        for sequence in sequences:
            table, written = self.ledger.tables[sequence.name], self._written[sequence.name]
            out = min(self._window.num_out_of_sight(sequence.num_computed_tokens), len(table))
            freed = sum(refs[block] == 1 for block in table[written.num_dropped : out])
            free += freed - written.num_taken(sequence, table, refs, self.ledger.block_size, num_lookahead)
            if free < 0:
                return False
        return True


def _pool(num_blocks: int, *, prefix_caching: bool) -> BlockPool:
    """Free order: block 0 first, then last freed; with caching blank blocks first, then the evictor."""
    order = reversed(range(num_blocks))
    return BlockPool(
        num_blocks, free_blocks=StackThenEvictor(order, keep_all=False) if prefix_caching else FreeStack(order)
    )
