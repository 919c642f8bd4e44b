"""Which prefixes the device blocks of live tables hold: registering what a step fills, finding it again (R107, R134-R138)."""

from collections.abc import Iterable
from dataclasses import dataclass

from block_manager.cache_rules import CachedSequence
from block_manager.hashing import HashChain, Rename, blocks_in, chain_salt
from block_manager.ledger import Ledger

NEVER = 2**62
NULL = 0
"""The block that is never used: it stands in tables for blocks behind a sliding window (R105, R137)."""


def num_leading(block: int, table: list[int]) -> int:
    """How many entries at the beginning of a table are that block."""
    return next((i for i, found in enumerate(table) if found != block), len(table))


@dataclass(slots=True)
class _Reach:
    """`num_tokens`: offset up to which a planned step promised the KV; `num_registered`: leading blocks that can be found."""

    num_tokens: int
    num_registered: int


@dataclass(frozen=True, slots=True)
class OpenEnd:
    """What registering a sequence's next full block takes; valid as long as it has its table."""

    chain: HashChain
    reach: _Reach
    table: list[int]


class PrefixBook:
    """Owner of the hash chain of every sequence and of how far its table is promised and registered.

    `rename`: other names under which tokens are hashed; None: their own.
    """

    def __init__(self, ledger: Ledger, *, enabled: bool, rename: Rename | None = None) -> None:
        self.enabled = enabled
        self._rename = rename
        self.num_lookups = 0
        self.num_hits = 0
        self._ledger = ledger
        self._chains: dict[str, HashChain] = {}
        self._reach: dict[str, _Reach] = {}

    def find(self, sequence: CachedSequence) -> list[int]:
        """Blocks of its longest known prefix that leaves at least one token to compute (R134)."""
        most = (len(sequence.token_ids) - 1) // self._ledger.block_size
        known = self._by_hash(sequence, most)
        promised = self._of_siblings(sequence, most)
        return promised if len(promised) > len(known) else known

    def find_all(self, sequence: CachedSequence, num_tokens: int) -> list[int | None]:
        """For each full block among its first `num_tokens` the device block that is known to hold the same, if any."""
        if not self.enabled or sequence.no_cache_reuse:
            return []
        full = min(num_tokens, len(sequence.token_ids)) // self._ledger.block_size
        return [self._ledger.gpu.lookup(block_hash) for block_hash in self._hashes(sequence, full)[:full]]

    def open(self, sequence: CachedSequence, num_cached_blocks: int) -> None:
        """It has a table now, whose first blocks are known already, or null."""
        self._reach[sequence.name] = _Reach(num_cached_blocks * self._ledger.block_size, num_cached_blocks)

    def open_fork(self, parent: CachedSequence, child: CachedSequence) -> None:
        """The child has the table of its parent now."""
        reach = self._reach[parent.name]
        self._reach[child.name] = _Reach(reach.num_tokens, reach.num_registered)

    def count(self, sequence: CachedSequence, num_hits: int) -> None:
        """It started with that many blocks found (R119)."""
        if self.enabled and not sequence.no_cache_reuse:
            self.num_lookups += (len(sequence.token_ids) - 1) // self._ledger.block_size
            self.num_hits += num_hits

    def promise(self, sequence: CachedSequence, num_tokens: int) -> None:
        """A planned step computes its KV up to that offset: others may build on it at once, as they run later (R136)."""
        self._reach[sequence.name].num_tokens = num_tokens
        self.register(sequence, num_tokens)

    def register(self, sequence: CachedSequence, num_tokens: int) -> int:
        """Full blocks among its first `num_tokens` can be found by others, as far as their tokens are known.

        Returns at how many tokens the next one will be full; without caching never.
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
        """Where the blocks that it fills next are registered one by one; None without caching."""
        if not self.enabled:
            return None
        name = sequence.name
        reach = self._reach[name]
        self._hashes(sequence, reach.num_registered)  # blocks of an older sample were found without hashing
        return OpenEnd(self._chains[name], reach, self._ledger.tables[name])

    def register_blocks(self, ends: Iterable[OpenEnd], data: bytes) -> None:
        """Each has filled its next block; `data`: the tokens of these blocks one after the other, little-endian int32."""
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
        """The KV from that offset on never came to be."""
        first = num_tokens // self._ledger.block_size
        reach = self._reach[sequence.name]
        reach.num_tokens = min(reach.num_tokens, num_tokens)
        reach.num_registered = min(reach.num_registered, first)
        for block in self._ledger.tables[sequence.name][first:]:
            self._ledger.gpu.unregister(block)

    def close(self, name: str) -> None:
        """It has no table any more."""
        self._reach.pop(name, None)

    def forget(self, name: str) -> None:
        """The sequence is over."""
        self._chains.pop(name, None)

    # --- inside ------------------------------------------------------------------------------------------------------

    def _hashes(self, sequence: CachedSequence, num_blocks: int) -> list[bytes]:
        """Of its first blocks, which must be full, and maybe of more."""
        chain = self._chains.get(sequence.name)
        if chain is None:
            salt = chain_salt(sequence.lora_id, sequence.cache_salt, self._rename)
            chain = self._chains[sequence.name] = HashChain(self._ledger.block_size, salt, self._rename)
        return chain.upto(sequence.token_ids, num_blocks)

    def _by_hash(self, sequence: CachedSequence, most: int) -> list[int]:
        if not self.enabled or sequence.no_cache_reuse:
            return []
        return self._ledger.gpu.find_run(self._hashes(sequence, most)[:most])

    def _of_siblings(self, sequence: CachedSequence, most: int) -> list[int]:
        """The full prompt blocks of an older sample of its request are its own too, cached or not (R19)."""
        best: list[int] = []
        for name in sequence.sibling_names:
            if name in self._reach:
                promised = min(self._reach[name].num_tokens, sequence.num_prompt_tokens)
                num_blocks = min(promised // self._ledger.block_size, most)
                if num_blocks > len(best) and self._ledger.tables[name][0] != NULL:
                    best = self._ledger.tables[name][:num_blocks]
        return best
