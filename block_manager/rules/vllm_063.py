"""Cache rules of vLLM 0.6.3: blocks by what a table has yet to hold, full ones found by contents, swap sequence by sequence.

Sections 4.6, 4.7, 5 and 6 of the requirements, as far as they say 0.6.3; R203, R205 and R206 are put right.
"""

from collections.abc import Iterable, Sequence
from typing import Self

from block_manager.cache_rules import AllocStatus, CachedSequence, Growth, Pair, PrefixHit
from block_manager.free_stack import FreeStack, StackThenEvictor
from block_manager.hashing import Rename
from block_manager.ledger import Ledger
from block_manager.pool import BlockPool
from block_manager.rules.allocator_063 import FullBlockAllocator
from block_manager.rules.computed_prefix import common_length
from block_manager.rules.sliding_window import SlidingWindow
from block_manager.rules.swap_063 import Swap063
from block_manager.rules.table_extent import Written
from block_manager.rules.tables_063 import Tables063


class Vllm063Rules:
    """Writer of the ledger under the rules of 0.6.3. `num_new_tokens` plays no part: tokens that are not yet in the table count."""

    def __init__(
        self,
        ledger: Ledger,
        *,
        prefix_caching: bool,
        watermark_blocks: int,
        sliding_window: int | None = None,
        exact_window: bool = False,
        counts_whole_prompts: bool = False,
        rename: Rename | None = None,
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
            ledger, self._blocks, self._written, self._window, prefix_caching=prefix_caching, rename=rename
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
        rename: Rename | None = None,
    ) -> Self:
        """Rules over a ledger of their own. `watermark_blocks` None: 1 % of the device blocks (R52). `sliding_window` in tokens,
        `exact_window`: see SlidingWindow. `counts_whole_prompts`: all blocks of a prompt in chunks count as computed with its first
        chunk, as recorded (R93)."""
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
    def capacity_tokens(self) -> int:
        """Tokens of the longest sequence that could be admitted alone; the null block of a sliding window is not its own."""
        null = int(self._window is not None)
        return max(0, self.ledger.gpu.num_blocks - self.watermark_blocks - null) * self.ledger.block_size

    @property
    def hits(self) -> tuple[int, int]:
        """(lookups, hits) of full blocks on the device, those of a swap-in included (R119)."""
        return self._blocks.num_queries, self._blocks.num_hits

    def resize(self, num_gpu_blocks: int, num_cpu_blocks: int) -> None:
        """Other sizes; ValueError where blocks in use would have to go."""
        self.ledger.resize(num_gpu_blocks, num_cpu_blocks)
        self._blocks.fit_pool()
        self._swap.fit_pools()

    # --- a group starts ---------------------------------------------------------------------------------------------

    def lookup(self, sequence: CachedSequence) -> PrefixHit:
        """Nothing: hits save blocks here, not tokens of the budget (R119)."""
        return PrefixHit()

    def can_admit(
        self, sequences: Sequence[CachedSequence], hit: PrefixHit, num_new_tokens: int, num_lookahead: int = 0
    ) -> AllocStatus:
        """As if nothing were cached (R51, R120). Under a sliding window both the recorded rule and the real need hold (R105); on an
        idle device the need alone, as the null block may lie for ever where the watermark should. A null block still to be taken
        is `can_extend`'s care: who only starts needs none."""
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
        """See CacheRules."""
        counted, taken = self._count_start(sequences, num_lookahead)
        return max(counted, taken - self.watermark_blocks)

    def _count_start(self, sequences: Sequence[CachedSequence], num_lookahead: int) -> tuple[int, int]:
        """Blocks by the recorded rule, which must stay above the watermark, and those that are really taken."""
        first = self.ledger.blocks_for(len(sequences[0].token_ids) + num_lookahead)
        counted = (min(first, self._window.num_blocks) if self._window else first) + self._num_tails(sequences)
        return counted, self.ledger.blocks_for(len(sequences[0].token_ids)) + self._num_tails(sequences)

    def admit(
        self, sequences: Sequence[CachedSequence], hit: PrefixHit, num_new_tokens: int, num_lookahead: int = 0
    ) -> None:
        """All blocks of all tokens at once, full ones by contents, in order; others share the prompt's full blocks (R88, R117)."""
        first, *others = sequences
        table = self._tables.fill(first, [])
        for other in others:
            shared = table[: self._num_prompt_blocks(sequences)]
            self.ledger.gpu.share(shared)
            self._tables.fill(other, shared)

    # --- a group goes on --------------------------------------------------------------------------------------------

    def num_touched(self, sequence: CachedSequence, num_lookahead: int = 0) -> int:
        """Blocks that its next append may write to, new or not: the worst case of what it takes (R66)."""
        return self._written[sequence.name].num_touched(sequence, self.ledger.block_size, num_lookahead)

    def can_extend(self, sequences: Sequence[CachedSequence], num_new_tokens: int, num_lookahead: int = 0) -> bool:
        """No more blocks touched than free ones, the exact corner of R66 included. No watermark."""
        if sum(self.num_touched(s, num_lookahead) for s in sequences) > self.ledger.gpu.num_free:
            return False
        return not (self._window and self._window.num_missing) or self._null_fits(sequences, num_lookahead)

    def fits_exactly(self, sequences: Sequence[CachedSequence], num_new_tokens: int, num_lookahead: int = 0) -> bool:
        """No more blocks taken than free ones: a partial last block that has room counts for nothing."""
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
        """Writes the unseen tokens into the table, with slots for `num_lookahead` more behind them (R67, R68)."""
        return self._tables.extend(sequence, num_lookahead)

    def fork(self, parent: CachedSequence, child: CachedSequence) -> None:
        """The child shares all blocks of its parent; no table: no-op (R102)."""
        self._tables.fork(parent, child)

    def commit(self, sequences: Iterable[CachedSequence], now: float) -> None:
        """Blocks registered so far count as computed, of a prompt in chunks those of its chunks unless whole prompts count; its
        sequences were accessed `now`, written to blocks when freed."""
        if self._prefix_caching:
            for sequence in sequences:
                self._written[sequence.name].last_accessed = now
                self._note_chunk(sequence)
            self._blocks.mark_computed(but=[block for name in self._chunked for block in self._unfilled(name)])

    def num_computed_blocks(self, sequences: Sequence[CachedSequence]) -> int:
        """Common leading computed blocks, remembered by sequence (R121); asked once for each group and step, before `commit`."""
        if not self._prefix_caching:
            return 0
        found = [self._computed_prefix(sequence) for sequence in sequences]
        return len(found[0]) if len(found) == 1 else common_length([blocks for blocks in found if blocks])

    def num_common_prefix_blocks(self, sequences: Sequence[CachedSequence]) -> int:
        """Leading blocks of the first that every table holds; 0 when caching is off (R143)."""
        if not self._prefix_caching or not sequences:
            return 0
        table = self.ledger.tables.get(sequences[0].name, [])
        own = (i for i, block in enumerate(table) if self.ledger.gpu.refs[block] != len(self.ledger.tables))
        return next(own, len(table))

    def settle(self, sequence: CachedSequence) -> None:
        """Nothing: blocks are registered when their tokens are written."""

    def retract(self, sequence: CachedSequence, num_computed_tokens: int) -> None:
        """Its blocks from that offset on cannot be found any more and are not computed. Not on the device: no-op."""
        if sequence.name in self.ledger.tables:
            first = num_computed_tokens // self.ledger.block_size
            self._blocks.retract(self.ledger.tables[sequence.name][first:])
            self._written[sequence.name].computed.cut(first)

    # --- a group moves between device and host ----------------------------------------------------------------------

    def can_swap_out(self, sequences: Sequence[CachedSequence]) -> bool:
        """R72, with the host's blocks and no watermark."""
        return self._swap.can_leave(sequences)

    def swap_out(self, sequences: Sequence[CachedSequence]) -> list[Pair]:
        """Sequence by sequence: plain shared blocks become several (R74, R204). What no step filled yet is not known any more."""
        for name in [s.name for s in sequences if s.name in self._chunked]:
            self._blocks.retract([block for block in self._unfilled(name) if self._blocks.is_touched(block)])
            del self._chunked[name]
        return self._swap.leave(sequences)

    def can_swap_in(self, sequences: Sequence[CachedSequence], num_lookahead: int = 0) -> AllocStatus:
        """R72, with the device's blocks and the watermark."""
        return self._swap.can_return(sequences, self.watermark_blocks, num_lookahead)

    def num_blocks_to_swap_in(self, sequences: Sequence[CachedSequence], num_lookahead: int = 0) -> int:
        """See CacheRules."""
        touched, needed = self._swap.count_return(sequences, num_lookahead)
        return max(touched, needed - self.watermark_blocks)

    def swap_in(self, sequences: Sequence[CachedSequence]) -> list[Pair]:
        """Sequence by sequence; full blocks that are known on the device are shared (R117)."""
        return self._swap.come_back(sequences)

    # --- a sequence ends --------------------------------------------------------------------------------------------

    def release(self, sequence: CachedSequence) -> None:
        """Frees its blocks, first to last, on whichever device; access times belong to the device's alone (R97, R117, R206)."""
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
        """Drops the keys of its blocks."""
        self._tables.forget(sequence.name)

    def reset_prefixes(self) -> None:
        """No contents are known any more, on either device (R142)."""
        self._blocks.reset()
        self.ledger.cpu.reset_prefixes()

    def try_reset_prefixes(self) -> bool:
        """The same, unless a block is in use: then False (R142)."""
        if self.ledger.tables or self.ledger.host_tables:
            return False
        self.reset_prefixes()
        return True

    # --- inside -----------------------------------------------------------------------------------------------------

    def _note_chunk(self, sequence: CachedSequence) -> None:
        num_filled = (sequence.num_computed_tokens + sequence.num_scheduled_tokens) // self.ledger.block_size
        if num_filled < len(sequence.token_ids) // self.ledger.block_size and not self._counts_whole_prompts:
            self._chunked[sequence.name] = num_filled
        else:
            self._chunked.pop(sequence.name, None)

    def _unfilled(self, name: str) -> list[int]:
        """Blocks of a prompt in chunks that no step has filled yet."""
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
        """Whether they can go on although the null block has to be taken first (R105): exact, as `extend` will do it."""
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
    """Block 0 first, then the last freed; with caching blank blocks first, then the evictor (R99, R117)."""
    order = reversed(range(num_blocks))
    return BlockPool(
        num_blocks, free_blocks=StackThenEvictor(order, keep_all=False) if prefix_caching else FreeStack(order)
    )
