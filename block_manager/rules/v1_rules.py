"""Cache rules of vLLM V1: allocate what the step needs, register full blocks at once, free in reverse.

Samples of one request share the full blocks of the prompt and, by copy-on-write, the blocks they fork with.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any, Self

from block_manager.cache_rules import AllocStatus, CachedSequence, Growth, Pair, PrefixHit
from block_manager.hashing import HashChain, HashRename
from block_manager.ledger import Ledger
from block_manager.pool import BlockPool
from block_manager.rules.prefix_book import NULL, PrefixBook, TableEnd


class NoSwap:
    """Cache rules without swap. The questions may be asked; calling `swap_out` or `swap_in` is a bug of the caller."""

    def can_swap_out(self, sequences: Sequence[CachedSequence]) -> bool:
        """Return False."""
        return False

    def swap_out(self, sequences: Sequence[CachedSequence]) -> list[Pair]:
        """Raise AssertionError."""
        raise AssertionError("these cache rules do not swap")

    def can_swap_in(self, sequences: Sequence[CachedSequence], num_lookahead: int = 0) -> AllocStatus:
        """Return NEVER."""
        return AllocStatus.NEVER

    def num_blocks_to_swap_in(self, sequences: Sequence[CachedSequence], num_lookahead: int = 0) -> int:
        """Return 0."""
        return 0

    def swap_in(self, sequences: Sequence[CachedSequence]) -> list[Pair]:
        """Raise AssertionError."""
        raise AssertionError("these cache rules do not swap")


class V1PoolRules(NoSwap):
    """V1's rules over a ledger. Block 0 is the null block and never allocated.

    `windowed`: blocks behind a sliding window are freed while a sequence goes on (`free_out_of_window`).
    `rename`, `chains`: those of `PrefixBook`.
    """

    def __init__(
        self,
        ledger: Ledger,
        *,
        max_model_len: int,
        prefix_caching: bool,
        rename: HashRename | None = None,
        chains: dict[str, HashChain] | None = None,
        windowed: bool = False,
    ) -> None:
        self.ledger = ledger
        self._pool = ledger.gpu
        self._max_model_len = max_model_len
        self._windowed = windowed
        self.watermark_blocks = 0
        self._prefixes = PrefixBook(ledger, enabled=prefix_caching, rename=rename, chains=chains)

    @classmethod
    def make(cls, *, block_size: int, num_gpu_blocks: int, num_cpu_blocks: int, **values: Any) -> Self:
        """Rules over a new ledger. `num_gpu_blocks` includes the null block; `values`: those of the rules themselves."""
        ledger = Ledger(block_size, gpu=BlockPool(num_gpu_blocks, num_reserved=1), cpu=BlockPool(num_cpu_blocks))
        return cls(ledger, **values)

    @property
    def device_pool(self) -> Self:
        """These rules."""
        return self

    @property
    def num_free_gpu(self) -> int:
        """Free device blocks."""
        return self._pool.num_free

    @property
    def num_free_cpu(self) -> int:
        """Free host blocks."""
        return self.ledger.cpu.num_free

    @property
    def capacity_tokens(self) -> int:
        """Tokens of a sequence that has the whole pool to itself."""
        return self._pool.num_usable * self.ledger.block_size

    @property
    def hits(self) -> tuple[int, int]:
        """(lookups, hits) in blocks of all admitted sequences; only full blocks that could be hit count."""
        return self._prefixes.num_lookups, self._prefixes.num_hits

    def resize(self, num_gpu_blocks: int, num_cpu_blocks: int) -> None:
        """Change the pool sizes. ValueError if blocks in use would be removed."""
        self.ledger.resize(num_gpu_blocks, num_cpu_blocks)

    # --- a group starts ---------------------------------------------------------------------------------------------

    def lookup(self, sequence: CachedSequence) -> PrefixHit:
        """Its longest cached prefix: registered blocks, or those of an older sample of its request."""
        blocks = self._prefixes.find(sequence)
        return PrefixHit(tuple(blocks), len(blocks) * self.ledger.block_size)

    def first_key(self, sequence: CachedSequence) -> bytes | None:
        """Hash of its first block; None without prefix caching."""
        return self._prefixes.first_hash(sequence)

    def num_cached_tokens(self, sequence: CachedSequence) -> int:
        """Tokens of its longest cached prefix."""
        return len(self._prefixes.find(sequence)) * self.ledger.block_size

    def can_admit(
        self, sequences: Sequence[CachedSequence], hit: PrefixHit, num_new_tokens: int, num_lookahead: int = 0
    ) -> AllocStatus:
        """NEVER if all their tokens together exceed the pool, whatever runs and whatever is cached.

        With a sliding window only `num_new_tokens` of the first sequence count, as it frees blocks while it goes on.
        """
        num_first = num_new_tokens if self._windowed else len(sequences[0].token_ids)
        if self._num_to_admit(sequences, PrefixHit(), num_first + num_lookahead) > self._pool.num_usable:
            return AllocStatus.NEVER
        return self._when(self._num_to_admit(sequences, hit, num_new_tokens + num_lookahead))

    def admit(
        self, sequences: Sequence[CachedSequence], hit: PrefixHit, num_new_tokens: int, num_lookahead: int = 0
    ) -> None:
        """Create their tables: hits and new blocks for the first sequence, at least the prompt's full blocks if
        others share it.
        """
        first, *others = sequences
        self._pool.share(hit.block_ids)
        table = self.ledger.tables[first.name] = list(hit.block_ids)
        self._prefixes.open(first, len(hit.block_ids))
        self._prefixes.count(first, len(hit.block_ids))
        upto = hit.num_tokens + num_new_tokens
        table += self._pool.allocate(self._num_blocks_of_first(sequences, upto + num_lookahead) - len(table))
        self._prefixes.reserve(first, upto)
        for other in others:
            shared = table[: self._num_prompt_blocks(first)]
            self._pool.share(shared)
            own = self._blocks_for(len(other.token_ids)) - len(shared)
            self.ledger.tables[other.name] = shared + self._pool.allocate(own)
            self._prefixes.open(other, 0)

    # --- a group continues ------------------------------------------------------------------------------------------

    def can_extend(self, sequences: Sequence[CachedSequence], num_new_tokens: int, num_lookahead: int = 0) -> bool:
        """Whether blocks suffice for `num_new_tokens` more tokens of each, copies of shared blocks included."""
        return self._num_to_extend(sequences, num_new_tokens + num_lookahead) <= self._pool.num_free

    def fits_exactly(self, sequences: Sequence[CachedSequence], num_new_tokens: int, num_lookahead: int = 0) -> bool:
        """Same as `can_extend`: needs are exact here."""
        return self.can_extend(sequences, num_new_tokens, num_lookahead)

    def extend(self, sequence: CachedSequence, num_new_tokens: int, num_lookahead: int = 0) -> Growth:
        """Allocate blocks for `num_new_tokens` more tokens. Shared blocks to be written are copied, except by
        their last owner.
        """
        table = self.ledger.tables[sequence.name]
        upto = sequence.num_computed_tokens + num_new_tokens
        shared = self._shared_written(sequence, table, upto + num_lookahead, self._pool.refs)
        copies = [self._copy(table, i) for i in shared]
        added = self._pool.allocate(max(0, self._blocks_for(upto + num_lookahead) - len(table)))
        table += added
        self._prefixes.reserve(sequence, upto)
        return Growth(added, copies, bool(copies))

    def fork(self, parent: CachedSequence, child: CachedSequence) -> None:
        """Let the child share all blocks of its parent; no-op if the parent has no table."""
        if parent.name in self.ledger.tables:
            table = self.ledger.tables[child.name] = list(self.ledger.tables[parent.name])
            self._pool.share(table)
            self._prefixes.open_fork(parent, child)

    def commit(self, sequences: Iterable[CachedSequence], now: float) -> None:
        """No-op: blocks are registered when they are allocated, and reused in the order in which they were freed."""

    def num_computed_blocks(self, sequences: Sequence[CachedSequence]) -> int:
        """Return 0: cached tokens are never scheduled here, so hits save token budget instead."""
        return 0

    def num_common_prefix_blocks(self, sequences: Sequence[CachedSequence]) -> int:
        """Leading blocks of the first sequence that every table holds; 0 when caching is off."""
        if not self._prefixes.enabled or not sequences:
            return 0
        table = self.ledger.tables.get(sequences[0].name, [])
        own = (i for i, block in enumerate(table) if self._pool.refs[block] != len(self.ledger.tables))
        return next(own, len(table))

    def free_out_of_window(self, sequence: CachedSequence, num_tokens: int, window: int) -> None:
        """Free blocks outside the sliding window of the tokens behind the first `num_tokens`, which must be
        computed.

        Blocks are freed lowest first and replaced by the null block; they stay cached. No-op without a table.
        """
        table = self.ledger.tables.get(sequence.name, [])
        first = end = min(len(table), max(0, num_tokens - window + 1) // self.ledger.block_size)
        while first and table[first - 1] != NULL:
            first -= 1
        self._pool.release(table[first:end])
        table[first:end] = [NULL] * (end - first)

    def commit_sampled(self, sequence: CachedSequence) -> None:
        """Register blocks that a result made full. No-op if the sequence has lost its blocks meanwhile."""
        if sequence.name in self.ledger.tables:
            self._prefixes.register(sequence, sequence.num_computed_tokens - sequence.num_placeholders)

    def retract(self, sequence: CachedSequence, num_computed_tokens: int) -> None:
        """Unregister the blocks from that token offset on: their KV was never computed. No-op without a table."""
        if sequence.name in self.ledger.tables:
            self._prefixes.retract(sequence, num_computed_tokens)

    # --- a sequence ends --------------------------------------------------------------------------------------------

    def release(self, sequence: CachedSequence) -> None:
        """Free its blocks, last first, so that the front of a prefix is evicted last. No-op without a table."""
        self._pool.release(reversed(self.ledger.tables.pop(sequence.name, [])))
        self._prefixes.close(sequence.name)

    def forget(self, sequence: CachedSequence) -> None:
        """Drop the hash chain of a sequence that ended."""
        self._prefixes.forget(sequence.name)

    def reset_prefixes(self) -> None:
        """Drop all cached prefixes."""
        self._pool.reset_prefixes()

    def try_reset_prefixes(self) -> bool:
        """Drop all cached prefixes. Returns False, and does nothing, while a block is in use."""
        if self.ledger.tables or self.ledger.host_tables:
            return False
        self.reset_prefixes()
        return True

    # --- one block at a time ------------------------------------------------------------------------------------------

    def append_blocks(self, ends: Sequence[TableEnd]) -> list[int]:
        """Append one block to each of these tables, in order. None may be about to write into a shared block."""
        blocks = self._pool.allocate(len(ends))
        for end, block in zip(ends, blocks, strict=True):
            end.table.append(block)
        return blocks

    def register(self, sequence: CachedSequence, num_tokens: int) -> int:
        """Register full blocks among the first `num_tokens` tokens; returns the length at which the next block is
        full.
        """
        return self._prefixes.register(sequence, num_tokens)

    def open_end(self, sequence: CachedSequence) -> TableEnd:
        """The end of its table; it changes until the table is released."""
        return self._prefixes.open_end(sequence)

    def register_blocks(self, ends: Iterable[TableEnd], data: bytes) -> None:
        """Register the next block of each sequence, filled with `data`: little-endian int32 [ends, block_size]."""
        self._prefixes.register_blocks(ends, data)

    def num_blocks_needed(self, sequence: CachedSequence, num_new_tokens: int) -> int:
        """Blocks that so many more tokens take, copies of shared blocks included."""
        return self._num_to_extend([sequence], num_new_tokens)

    def num_blocks_to_admit(
        self, sequences: Sequence[CachedSequence], hit: PrefixHit, num_new_tokens: int, num_lookahead: int = 0
    ) -> int:
        """Free blocks that a group takes to start with `num_new_tokens` of the first sequence behind its hit."""
        return self._num_to_admit(sequences, hit, num_new_tokens + num_lookahead)

    def num_blocks_to_extend(self, sequences: Sequence[CachedSequence], num_new_tokens: int) -> int:
        """Free blocks that so many more tokens of each take, copies of shared blocks included."""
        return self._num_to_extend(sequences, num_new_tokens)

    # --- block needs --------------------------------------------------------------------------------------------------

    def _when(self, num_needed: int) -> AllocStatus:
        reserve = self.watermark_blocks if self.ledger.tables else 0
        return AllocStatus.OK if self._pool.num_free - num_needed >= reserve else AllocStatus.LATER

    def _blocks_for(self, num_tokens: int) -> int:
        return self.ledger.blocks_for(min(num_tokens, self._max_model_len))

    def _num_prompt_blocks(self, sequence: CachedSequence) -> int:
        return sequence.num_prompt_tokens // self.ledger.block_size

    def _num_blocks_of_first(self, sequences: Sequence[CachedSequence], num_tokens: int) -> int:
        shared = self._num_prompt_blocks(sequences[0]) if len(sequences) > 1 else 0
        return max(self._blocks_for(num_tokens), shared)

    def _num_to_admit(self, sequences: Sequence[CachedSequence], hit: PrefixHit, num_new_tokens: int) -> int:
        needed = self._num_blocks_of_first(sequences, hit.num_tokens + num_new_tokens) - len(hit.block_ids)
        needed += list(map(self._pool.refs.__getitem__, hit.block_ids)).count(0)
        for other in sequences[1:]:
            needed += self._blocks_for(len(other.token_ids)) - self._num_prompt_blocks(sequences[0])
        return needed

    def _num_to_extend(self, sequences: Sequence[CachedSequence], num_new_tokens: int) -> int:
        goals = [(s, self.ledger.tables[s.name], s.num_computed_tokens + num_new_tokens) for s in sequences]
        return self._num_to_reach(goals, self._pool.refs)

    def _num_to_reach(self, goals: Iterable[tuple[CachedSequence, list[int], int]], refs: list[int]) -> int:
        """Blocks needed so that each table holds tokens up to an offset, copies included."""
        needed = 0
        writers: Counter[int] = Counter()
        for sequence, table, upto in goals:
            needed += max(0, self._blocks_for(upto) - len(table))
            writers.update(table[i] for i in self._shared_written(sequence, table, upto, refs))
        return needed + sum(min(num, refs[block] - 1) for block, num in writers.items())

    def _shared_written(self, sequence: CachedSequence, table: list[int], upto: int, refs: list[int]) -> list[int]:
        """Indexes in its table of shared blocks that its tokens up to that offset are written to.

        Full blocks of the prompt are excluded: all their owners would write the same.
        """
        first = max(sequence.num_computed_tokens, sequence.num_prompt_tokens) // self.ledger.block_size
        end = min(len(table), self._blocks_for(upto))
        return [i for i in range(first, end) if refs[table[i]] > 1]

    def _copy(self, table: list[int], place: int) -> Pair:
        source = table[place]
        [table[place]] = self._pool.allocate(1)
        self._pool.release([source])
        return source, table[place]
