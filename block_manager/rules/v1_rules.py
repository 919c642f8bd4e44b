"""Cache rules of vLLM V1: allocate what the step needs, register full blocks at once, free in reverse.

Samples of one request share the full blocks of the prompt and, by copy-on-write, the blocks they fork with.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any, Self

from block_manager.cache_rules import CachedSequence, Growth, Pair, PrefixHit
from block_manager.hashing import HashChain, HashRename
from block_manager.ledger import Ledger
from block_manager.pool import BlockPool
from block_manager.rules.cache_groups import NULL, longest_hit, next_behind, num_behind, num_leading, take_behind
from block_manager.rules.pool_rules import PoolRules
from block_manager.rules.prefix_book import NEVER, PrefixBook, TableEnd
from block_manager.rules.state_tables import StateTables


class V1PoolRules(PoolRules):
    """V1's rules over a ledger. Block 0 is the null block and never allocated.

    `window`: sliding window in tokens; blocks behind it are freed while a sequence goes on (`free_out_of_window`).
    None: the whole sequence is attended to. `rename`, `chains`, `group`: those of `PrefixBook`.
    """

    checkpoint_tokens = 0
    journals_prefixes = True

    def __init__(
        self,
        ledger: Ledger,
        *,
        max_model_len: int,
        prefix_caching: bool,
        rename: HashRename | None = None,
        chains: dict[str, HashChain] | None = None,
        window: int | None = None,
        group: int | None = None,
        watermark_blocks: int = 0,
    ) -> None:
        super().__init__(ledger, watermark_blocks)
        self.window = window
        self.max_model_len = max_model_len
        self._prefixes = PrefixBook(ledger, enabled=prefix_caching, rename=rename, chains=chains, group=group)

    @classmethod
    def make(cls, *, block_size: int, num_gpu_blocks: int, num_cpu_blocks: int, **values: Any) -> Self:
        """Rules over a new ledger. `num_gpu_blocks` includes the null block; `values`: those of the rules themselves."""
        ledger = Ledger(block_size, gpu=BlockPool(num_gpu_blocks, num_reserved=1), cpu=BlockPool(num_cpu_blocks))
        return cls(ledger, **values)

    @property
    def has_windows(self) -> bool:
        """True if the sequences have a sliding window."""
        return self.window is not None

    @property
    def fast_pool(self) -> Self:
        """These rules."""
        return self

    @property
    def capacity_tokens(self) -> int:
        """Tokens of a sequence that has the whole pool to itself."""
        return self.capacity_blocks * self.ledger.block_size

    @property
    def hits(self) -> tuple[int, int]:
        """(lookups, hits) in blocks of all admitted sequences; only full blocks that could be hit count."""
        return self._prefixes.num_lookups, self._prefixes.num_hits

    # --- a group starts ---------------------------------------------------------------------------------------------

    def lookup(self, sequence: CachedSequence) -> PrefixHit:
        """Its longest cached prefix: registered blocks, or those of an older sample of its request."""
        blocks = self._prefixes.find(sequence)
        return PrefixHit(tuple(blocks), len(blocks) * self.ledger.block_size)

    def find_blocks(self, sequence: CachedSequence, num_blocks: int) -> list[int | None]:
        """For each of its first blocks, which must be full, the device block with its contents, or None. Without a
        window the list ends where the first one is missing.
        """
        if self.window is None:
            return [*self._prefixes.find(sequence)[:num_blocks]]
        return self._prefixes.find_each(sequence, num_blocks)

    def longest_hit(self, blocks: Sequence[int | None]) -> int:
        """The most leading blocks that can be shared, of those that `find_blocks` gave."""
        return len(blocks) if self.window is None else longest_hit(blocks, self.window, self.ledger.block_size)

    def shared_table(self, blocks: Sequence[int | None]) -> list[int]:
        """A table that shares these blocks, with null blocks where its next token does not attend to them."""
        size = self.ledger.block_size
        behind = 0 if self.window is None else num_behind(len(blocks) * size, self.window, size)
        return [NULL] * behind + [block for block in blocks[behind:] if block is not None]

    def first_key(self, sequence: CachedSequence) -> bytes | None:
        """Hash of its first block; None without prefix caching."""
        return self._prefixes.first_hash(sequence)

    def num_cached_tokens(self, sequence: CachedSequence) -> int:
        """Tokens of its longest cached prefix."""
        return len(self._prefixes.find(sequence)) * self.ledger.block_size

    def admit(
        self, sequences: Sequence[CachedSequence], hit: PrefixHit, num_new_tokens: int, num_lookahead: int = 0
    ) -> None:
        """Create their tables: hits and new blocks for the first sequence, at least the prompt's full blocks if
        others share it.
        """
        self._pool.share(hit.block_ids)
        self.start(sequences, hit, num_new_tokens, num_lookahead)

    def start(
        self, sequences: Sequence[CachedSequence], hit: PrefixHit, num_new_tokens: int, num_lookahead: int = 0
    ) -> None:
        """Create their tables as `admit` does, with a hit of blocks that are referenced already."""
        first, *others = sequences
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
            self._prefixes.open(other, num_leading(NULL, shared))

    # --- a group continues ------------------------------------------------------------------------------------------

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

    def num_common_prefix_blocks(self, sequences: Sequence[CachedSequence]) -> int:
        """Leading blocks of the first sequence that every table holds; 0 when caching is off."""
        if not self._prefixes.enabled or not sequences:
            return 0
        table = self.ledger.tables.get(sequences[0].name, [])
        own = (i for i, block in enumerate(table) if self._pool.refs[block] != len(self.ledger.tables))
        return next(own, len(table))

    def take_out_of_window(self, sequence: CachedSequence, num_tokens: int) -> list[int]:
        """See `PoolRules.take_out_of_window`."""
        if self.window is None:
            return []
        table = self.ledger.tables.get(sequence.name, [])
        return take_behind(table, num_behind(num_tokens, self.window, self.ledger.block_size))

    def next_out_of_window(self, num_tokens: int) -> int:
        """The number of computed tokens from which on blocks are outside the window that were not at `num_tokens`."""
        return NEVER if self.window is None else next_behind(num_tokens, self.window, self.ledger.block_size)

    def commit_sampled(self, sequence: CachedSequence) -> None:
        """Register blocks that a result made full. No-op if the sequence has lost its blocks meanwhile."""
        if sequence.name in self.ledger.tables:
            self._prefixes.register(sequence, sequence.num_computed_tokens - sequence.num_placeholders)

    def has_unregistered(self, sequence: CachedSequence, num_tokens: int) -> bool:
        """True if a full block among the first `num_tokens` tokens of its table is not registered yet."""
        return self._prefixes.has_unregistered(sequence, num_tokens)

    def retract(self, sequence: CachedSequence, num_computed_tokens: int) -> None:
        """Unregister the blocks from that token offset on: their KV was never computed. No-op without a table."""
        if sequence.name in self.ledger.tables:
            self._prefixes.retract(sequence, num_computed_tokens)

    def states_beside(
        self, ledger: Ledger, num_blocks: int, checkpoint_tokens: int, *, keeps_unknown: bool
    ) -> StateTables:
        """Tables of states, with checkpoints by these rules' hashes; see `StateTables`."""
        return StateTables(ledger, num_blocks, checkpoint_tokens, self._prefixes, keeps_unknown=keeps_unknown)

    # --- a sequence ends --------------------------------------------------------------------------------------------

    def release(self, sequence: CachedSequence) -> None:
        """Free its blocks, last first, so that the front of a prefix is evicted last. No-op without a table."""
        self._pool.release(reversed(self.ledger.tables.pop(sequence.name, [])))
        self._prefixes.close(sequence.name)

    def forget(self, sequence: CachedSequence) -> None:
        """Drop the hash chain of a sequence that ended."""
        self._prefixes.forget(sequence.name)

    # --- one block at a time ------------------------------------------------------------------------------------------

    def append_blocks(self, ends: Sequence[TableEnd]) -> list[list[int]]:
        """Append one block to each of these tables, in order. None may be about to write into a shared block."""
        added = [[block] for block in self._pool.allocate(len(ends))]
        for end, blocks in zip(ends, added, strict=True):
            end.table += blocks
        return added

    def register(self, sequence: CachedSequence, num_tokens: int) -> int:
        """Register full blocks among the first `num_tokens` tokens; returns the length at which the next block is
        full.
        """
        return self._prefixes.register(sequence, num_tokens)

    def open_end(self, sequence: CachedSequence) -> TableEnd:
        """The end of its table; it changes until the table is released."""
        return self._prefixes.open_end(sequence)

    def register_blocks(self, ends: Sequence[TableEnd], data: bytes) -> None:
        """Register the next block of each sequence, filled with `data`: little-endian int32 [ends, block_size]."""
        self.register_next(ends, self.next_hashes(ends, data))

    def next_hashes(self, ends: Iterable[TableEnd], data: bytes) -> list[bytes]:
        """See `PrefixBook.next_hashes`."""
        return self._prefixes.next_hashes(ends, data)

    def register_next(self, ends: Iterable[TableEnd], hashes: list[bytes]) -> None:
        """See `PrefixBook.register_next`."""
        self._prefixes.register_next(ends, hashes)

    def has_unnamed_checkpoint(self, sequence: CachedSequence) -> bool:
        """Return False: there are no states."""
        return False

    # --- block needs --------------------------------------------------------------------------------------------------

    def _blocks_for(self, num_tokens: int) -> int:
        return self.ledger.blocks_for(min(num_tokens, self.max_model_len))

    def _num_prompt_blocks(self, sequence: CachedSequence) -> int:
        return sequence.num_prompt_tokens // self.ledger.block_size

    def _num_blocks_of_first(self, sequences: Sequence[CachedSequence], num_tokens: int) -> int:
        shared = self._num_prompt_blocks(sequences[0]) if len(sequences) > 1 else 0
        return max(self._blocks_for(num_tokens), shared)

    def num_to_admit(self, sequences: Sequence[CachedSequence], hit: PrefixHit, num_new_tokens: int) -> int:
        """Blocks behind the hit, and those of the hit that are free."""
        needed = self._num_blocks_of_first(sequences, hit.num_tokens + num_new_tokens) - len(hit.block_ids)
        needed += list(map(self._pool.refs.__getitem__, hit.block_ids)).count(0) - hit.block_ids.count(NULL)
        for other in sequences[1:]:
            needed += self._blocks_for(len(other.token_ids)) - self._num_prompt_blocks(sequences[0])
        return needed

    def num_alone(self, sequences: Sequence[CachedSequence], num_new_tokens: int, num_lookahead: int) -> int:
        """Blocks for all tokens that they have; with a sliding window, behind which blocks are freed, only
        `num_new_tokens` of the first sequence count.
        """
        num_first = num_new_tokens if self.has_windows else len(sequences[0].token_ids)
        return self.num_to_admit(sequences, PrefixHit(), num_first + num_lookahead)

    def num_to_extend(self, sequences: Sequence[CachedSequence], num_new_tokens: int) -> int:
        """Blocks behind the ends of their tables, and copies of shared blocks that they will write to."""
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
