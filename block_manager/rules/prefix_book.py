"""Prefixes held by device blocks of live tables: registration of blocks that a step fills, and prefix lookup."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from block_manager.cache_rules import CachedSequence
from block_manager.hashing import HashChain, HashRename, PrefixJournal, blocks_in, chain_salt, little_endian
from block_manager.ledger import Ledger
from block_manager.rules.cache_groups import NULL

NEVER = 2**62


@dataclass(slots=True)
class TableEnd:
    """The end of a live table: how far it is reserved and registered; valid while the sequence keeps its table.

    `num_tokens`: offset up to which a planned step computes the KV; `num_registered`: leading blocks that are
    registered. `chain`: hashes of its blocks, set by `open_end`; None without prefix caching.
    """

    table: list[int]
    num_tokens: int
    num_registered: int
    chain: HashChain | None = None

    @property
    def num_held(self) -> int:
        """Blocks of the table, without null blocks."""
        return len(self.table) - self.table.count(NULL)


class PrefixBook:
    """Owner of the hash chain of every sequence, and of how far its table is reserved and registered.

    `rename`: mapping of token ids before hashing; None: no mapping. `chains`: hash chains by sequence, shared by
    books of equal block sizes so that each prompt is hashed once; None: chains of its own. `group`: the number of the
    cache group, where several have blocks in one pool: equal tokens have other KV in each.
    """

    def __init__(
        self,
        ledger: Ledger,
        *,
        enabled: bool,
        rename: HashRename | None = None,
        chains: dict[str, HashChain] | None = None,
        group: int | None = None,
    ) -> None:
        self.enabled = enabled
        self._mark = b"" if group is None else group.to_bytes(2, "little")
        self._rename = rename
        self.num_lookups = 0
        self.num_hits = 0
        self._ledger = ledger
        self._chains: dict[str, HashChain] = {} if chains is None else chains
        self._ends: dict[str, TableEnd] = {}

    def find(self, sequence: CachedSequence) -> list[int]:
        """Blocks of its longest cached prefix, leaving at least one token to compute."""
        most = (len(sequence.token_ids) - 1) // self._ledger.block_size
        known: list[int] = []
        if self.enabled and not sequence.no_cache_reuse:
            known = self._ledger.gpu.find_run(self._keys(sequence, 0, most))
        return max(known, self._of_siblings(sequence, most), key=len) if sequence.sibling_names else known

    def first_hash(self, sequence: CachedSequence) -> bytes | None:
        """Hash of its first block; None if that is not full, or nothing cached is used."""
        if not self.enabled or sequence.no_cache_reuse or len(sequence.token_ids) <= self._ledger.block_size:
            return None
        return self._keys(sequence, 0, 1)[0]

    def find_all(self, sequence: CachedSequence, num_tokens: int) -> list[int | None]:
        """For each full block among the first `num_tokens` tokens the device block that caches the same contents,
        or None.
        """
        if not self.enabled or sequence.no_cache_reuse:
            return []
        full = min(num_tokens, len(sequence.token_ids)) // self._ledger.block_size
        return [self._ledger.gpu.lookup(key) for key in self._keys(sequence, 0, full)]

    def find_each(self, sequence: CachedSequence, num_blocks: int) -> list[int | None]:
        """For each of its first blocks, which must be full, a device block with its contents: a registered one, or an
        older sample's; None if there is none.
        """
        found = self.find_all(sequence, num_blocks * self._ledger.block_size) or [None] * num_blocks
        for table in self._tables_of_siblings(sequence, num_blocks):
            for at, block in enumerate(table):
                if found[at] is None and block != NULL:
                    found[at] = block
        return found

    def open(self, sequence: CachedSequence, num_cached_blocks: int) -> None:
        """Start tracking a new table; its first blocks are cached or null."""
        name, num_tokens = sequence.name, num_cached_blocks * self._ledger.block_size
        self._ends[name] = TableEnd(self._ledger.tables[name], num_tokens, num_cached_blocks)

    def open_fork(self, parent: CachedSequence, child: CachedSequence) -> None:
        """Start tracking a forked child, which has its parent's table."""
        end = self._ends[parent.name]
        self._ends[child.name] = TableEnd(self._ledger.tables[child.name], end.num_tokens, end.num_registered)

    def count(self, sequence: CachedSequence, num_hits: int) -> None:
        """Count the lookup of a started sequence, with its hits in blocks."""
        if self.enabled and not sequence.no_cache_reuse:
            self.num_lookups += (len(sequence.token_ids) - 1) // self._ledger.block_size
            self.num_hits += num_hits

    def reserve(self, sequence: CachedSequence, num_tokens: int) -> None:
        """Register blocks up to that token offset: a planned step computes their KV, and steps that reuse it run
        later.
        """
        self._ends[sequence.name].num_tokens = num_tokens
        self.register(sequence, num_tokens)

    def register(self, sequence: CachedSequence, num_tokens: int) -> int:
        """Register full blocks among the first `num_tokens` tokens, as far as their tokens are known.

        Returns the length at which the next block is full; NEVER without prefix caching.
        """
        if not self.enabled:
            return NEVER
        full = min(num_tokens, len(sequence.token_ids)) // self._ledger.block_size
        end = self._ends[sequence.name]
        first = end.num_registered
        if full > first:
            self._ledger.gpu.register_all(end.table[first:full], self._keys(sequence, first, full))
            end.num_registered = full
            if self._ledger.gpu.journal is not None:
                self._note(self._ledger.gpu.journal, sequence, first, full)
        return (end.num_registered + 1) * self._ledger.block_size

    def has_unregistered(self, sequence: CachedSequence, num_tokens: int) -> bool:
        """True if `register` would register a block."""
        full = min(num_tokens, len(sequence.token_ids)) // self._ledger.block_size
        return self.enabled and full > self._ends[sequence.name].num_registered

    def open_end(self, sequence: CachedSequence) -> TableEnd:
        """State to append blocks to its table, and to register those that it fills next."""
        end = self._ends[sequence.name]
        if self.enabled:
            # Blocks of an older sample were found without hashing, and a chain of a snapshot must be taken up again.
            self.hashes(sequence, end.num_registered)
            end.chain = self._chains[sequence.name]
            if self._ledger.gpu.journal is not None and not sequence.cache_salt:
                self._ledger.gpu.journal.admit(end.chain, sequence.lora_id)
        return end

    def next_hashes(self, ends: Iterable[TableEnd], data: bytes) -> list[bytes]:
        """Hash of the next block of each sequence. `data`: the tokens of these blocks in order, little-endian int32."""
        named = data if self._rename is None else self._rename.tokens(data)
        hashes = []
        for end, contents in zip(ends, blocks_in(named, self._ledger.block_size), strict=True):
            assert end.chain is not None
            hashes.append(end.chain.block(end.num_registered, contents))
        if self._ledger.gpu.journal is not None:
            for end, contents in zip(ends, blocks_in(data, self._ledger.block_size), strict=True):
                assert end.chain is not None
                self._ledger.gpu.journal.note(end.chain, end.num_registered, contents, self._ledger.block_size)
        return hashes

    def register_next(self, ends: Iterable[TableEnd], hashes: list[bytes]) -> None:
        """Register the next block of each sequence under these hashes."""
        blocks = []
        for end in ends:
            blocks.append(end.table[end.num_registered])
            end.num_registered += 1
        self._ledger.gpu.register_all(blocks, self._marked(hashes))

    def retract(self, sequence: CachedSequence, num_tokens: int) -> None:
        """Unregister the blocks from that token offset on: their KV was not computed."""
        first = num_tokens // self._ledger.block_size
        end = self._ends[sequence.name]
        end.num_tokens = min(end.num_tokens, num_tokens)
        end.num_registered = min(end.num_registered, first)
        for block in end.table[first:]:
            self._ledger.gpu.unregister(block)

    def hashes(self, sequence: CachedSequence, num_blocks: int) -> list[bytes]:
        """Hashes of at least its first `num_blocks` blocks, which must be full."""
        chain = self._chains.get(sequence.name)
        if chain is None:
            salt = chain_salt(sequence.lora_id, sequence.cache_salt, self._rename)
            chain = self._chains[sequence.name] = HashChain(self._ledger.block_size, salt, self._rename)
        return chain.upto(sequence.token_ids, num_blocks)

    def close(self, name: str) -> None:
        """Stop tracking the table of a sequence."""
        self._ends.pop(name, None)

    def forget(self, name: str) -> None:
        """Drop the hash chain of a sequence that ended."""
        self._chains.pop(name, None)

    # --- internals ---------------------------------------------------------------------------------------------------

    def _keys(self, sequence: CachedSequence, first: int, end: int) -> list[bytes]:
        """Keys in the pool of its blocks from `first` to `end`, which must be full."""
        return self._marked(self.hashes(sequence, end)[first:end])

    def _note(self, journal: PrefixJournal, sequence: CachedSequence, first: int, end: int) -> None:
        """Note the contents of its blocks from `first` to `end` unless they are under a salt."""
        if not sequence.cache_salt:
            chain, size = self._chains[sequence.name], self._ledger.block_size
            journal.admit(chain, sequence.lora_id)
            journal.note(chain, first, little_endian(sequence.token_ids[first * size : end * size]), size)

    def _marked(self, hashes: list[bytes]) -> list[bytes]:
        return [block_hash + self._mark for block_hash in hashes] if self._mark else hashes

    def _of_siblings(self, sequence: CachedSequence, most: int) -> list[int]:
        """Full prompt blocks of the older sample of the same request that has the most of them."""
        whole = (table for table in self._tables_of_siblings(sequence, most) if table[:1] != [NULL])
        return max(whole, key=len, default=[])

    def _tables_of_siblings(self, sequence: CachedSequence, most: int) -> Iterator[list[int]]:
        """Full prompt blocks of each older sample of the same request, usable even if not registered."""
        for name in sequence.sibling_names:
            end = self._ends.get(name)
            if end is not None:
                num_tokens = min(end.num_tokens, sequence.num_prompt_tokens)
                yield end.table[: min(num_tokens // self._ledger.block_size, most)]
