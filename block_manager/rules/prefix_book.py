"""Prefixes held by device blocks of live tables: registration of blocks that a step fills, and prefix lookup."""

from collections.abc import Iterable
from dataclasses import dataclass

from block_manager.cache_rules import CachedSequence
from block_manager.hashing import HashChain, HashRename, blocks_in, chain_salt
from block_manager.ledger import Ledger

NEVER = 2**62
NULL = 0
"""The null block, never allocated; it stands in tables for blocks behind a sliding window."""


def num_leading(block: int, table: list[int]) -> int:
    """Number of leading entries of a table that are that block."""
    return next((i for i, found in enumerate(table) if found != block), len(table))


@dataclass(slots=True)
class _Reach:
    """`num_tokens`: offset up to which a planned step computes the KV; `num_registered`: leading blocks that are
    registered.
    """

    num_tokens: int
    num_registered: int


@dataclass(frozen=True, slots=True)
class OpenEnd:
    """State needed to register a sequence's next full block; valid while the sequence keeps its table."""

    chain: HashChain
    reach: _Reach
    table: list[int]


class PrefixBook:
    """Owner of the hash chain of every sequence, and of how far its table is reserved and registered.

    `rename`: mapping of token ids before hashing; None: no mapping.
    """

    def __init__(self, ledger: Ledger, *, enabled: bool, rename: HashRename | None = None) -> None:
        self.enabled = enabled
        self._rename = rename
        self.num_lookups = 0
        self.num_hits = 0
        self._ledger = ledger
        self._chains: dict[str, HashChain] = {}
        self._reach: dict[str, _Reach] = {}

    def find(self, sequence: CachedSequence) -> list[int]:
        """Blocks of its longest cached prefix, leaving at least one token to compute."""
        most = (len(sequence.token_ids) - 1) // self._ledger.block_size
        known: list[int] = []
        if self.enabled and not sequence.no_cache_reuse:
            known = self._ledger.gpu.find_run(self._hashes(sequence, most)[:most])
        return max(known, self._of_siblings(sequence, most), key=len) if sequence.sibling_names else known

    def find_all(self, sequence: CachedSequence, num_tokens: int) -> list[int | None]:
        """For each full block among the first `num_tokens` tokens the device block that caches the same contents,
        or None.
        """
        if not self.enabled or sequence.no_cache_reuse:
            return []
        full = min(num_tokens, len(sequence.token_ids)) // self._ledger.block_size
        return [self._ledger.gpu.lookup(block_hash) for block_hash in self._hashes(sequence, full)[:full]]

    def open(self, sequence: CachedSequence, num_cached_blocks: int) -> None:
        """Start tracking a new table; its first blocks are cached or null."""
        self._reach[sequence.name] = _Reach(num_cached_blocks * self._ledger.block_size, num_cached_blocks)

    def open_fork(self, parent: CachedSequence, child: CachedSequence) -> None:
        """Start tracking a forked child, which has its parent's table."""
        reach = self._reach[parent.name]
        self._reach[child.name] = _Reach(reach.num_tokens, reach.num_registered)

    def count(self, sequence: CachedSequence, num_hits: int) -> None:
        """Count the lookup of a started sequence, with its hits in blocks."""
        if self.enabled and not sequence.no_cache_reuse:
            self.num_lookups += (len(sequence.token_ids) - 1) // self._ledger.block_size
            self.num_hits += num_hits

    def reserve(self, sequence: CachedSequence, num_tokens: int) -> None:
        """Register blocks up to that token offset: a planned step computes their KV, and steps that reuse it run
        later.
        """
        self._reach[sequence.name].num_tokens = num_tokens
        self.register(sequence, num_tokens)

    def register(self, sequence: CachedSequence, num_tokens: int) -> int:
        """Register full blocks among the first `num_tokens` tokens, as far as their tokens are known.

        Returns the length at which the next block is full; NEVER without prefix caching.
        """
        if not self.enabled:
            return NEVER
        full = min(num_tokens, len(sequence.token_ids)) // self._ledger.block_size
        reach = self._reach[sequence.name]
        if full > reach.num_registered:
            self._register(sequence, reach, full)
        return (reach.num_registered + 1) * self._ledger.block_size

    def _register(self, sequence: CachedSequence, reach: _Reach, full: int) -> None:
        first, size = reach.num_registered, self._ledger.block_size
        hashes = self._hashes(sequence, full)[first:full]
        table = self._ledger.tables[sequence.name][first:full]
        self._ledger.gpu.register_all(table, hashes, range((first + 1) * size, (full + 1) * size, size))
        reach.num_registered = full

    def open_end(self, sequence: CachedSequence) -> OpenEnd | None:
        """State to register the blocks that the sequence fills next; None without prefix caching."""
        if not self.enabled:
            return None
        name = sequence.name
        reach = self._reach[name]
        self._hashes(sequence, reach.num_registered)  # blocks of an older sample were found without hashing
        return OpenEnd(self._chains[name], reach, self._ledger.tables[name])

    def register_blocks(self, ends: Iterable[OpenEnd], data: bytes) -> None:
        """Register the next block of each sequence. `data`: the tokens of these blocks in order, little-endian int32."""
        size = self._ledger.block_size
        data = data if self._rename is None else self._rename.tokens(data)
        blocks, hashes, lengths = [], [], []
        for end, contents in zip(ends, blocks_in(data, size), strict=True):
            index = end.reach.num_registered
            blocks.append(end.table[index])
            hashes.append(end.chain.block(index, contents))
            end.reach.num_registered = index = index + 1
            lengths.append(index * size)
        self._ledger.gpu.register_all(blocks, hashes, lengths)

    def retract(self, sequence: CachedSequence, num_tokens: int) -> None:
        """Unregister the blocks from that token offset on: their KV was not computed."""
        first = num_tokens // self._ledger.block_size
        reach = self._reach[sequence.name]
        reach.num_tokens = min(reach.num_tokens, num_tokens)
        reach.num_registered = min(reach.num_registered, first)
        for block in self._ledger.tables[sequence.name][first:]:
            self._ledger.gpu.unregister(block)

    def close(self, name: str) -> None:
        """Stop tracking the table of a sequence."""
        self._reach.pop(name, None)

    def forget(self, name: str) -> None:
        """Drop the hash chain of a sequence that ended."""
        self._chains.pop(name, None)

    # --- internals ---------------------------------------------------------------------------------------------------

    def _hashes(self, sequence: CachedSequence, num_blocks: int) -> list[bytes]:
        """Hashes of at least its first `num_blocks` blocks, which must be full."""
        chain = self._chains.get(sequence.name)
        if chain is None:
            salt = chain_salt(sequence.lora_id, sequence.cache_salt, self._rename)
            chain = self._chains[sequence.name] = HashChain(self._ledger.block_size, salt, self._rename)
        return chain.upto(sequence.token_ids, num_blocks)

    def _of_siblings(self, sequence: CachedSequence, most: int) -> list[int]:
        """Full prompt blocks of an older sample of the same request, usable even if not registered."""
        best: list[int] = []
        for name in sequence.sibling_names:
            if name in self._reach:
                reserved = min(self._reach[name].num_tokens, sequence.num_prompt_tokens)
                num_blocks = min(reserved // self._ledger.block_size, most)
                if num_blocks > len(best) and self._ledger.tables[name][0] != NULL:
                    best = self._ledger.tables[name][:num_blocks]
        return best
