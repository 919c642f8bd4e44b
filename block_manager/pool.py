"""Blocks of one device: reference counts, order of reuse, and the map from prefix hashes to blocks.

Copy-on-write of shared blocks is a matter of the cache rules (`rules/`).
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Protocol

from block_manager.eviction_queue import EvictionQueue
from block_manager.hashing import PrefixJournal

NEVER_ACCESSED = -1.0


@dataclass(frozen=True, slots=True)
class PoolCounts:
    """`total`: blocks that sequences can use; `free`: unreferenced ones; `cached`: free ones that hold a cached
    prefix.
    """

    total: int
    free: int
    cached: int


class FreeBlocks(Protocol):
    """The free blocks of a pool and the order in which they are reused."""

    def __len__(self) -> int: ...
    def __iter__(self) -> Iterator[int]: ...

    def pop_many(self, count: int) -> list[int]:
        """Remove and return the next `count` blocks, which must exist."""

    def remove(self, blocks: list[int]) -> None:
        """Remove free blocks, to be used with their contents."""

    def extend(self, blocks: list[int], pool: "BlockPool") -> None:
        """Add freed blocks of this pool, in this order."""

    def grow(self, blocks: list[int]) -> None:
        """Add blocks that were not in the pool. They are reused after all other blank blocks, in this order."""


class BlockPool:
    """Owner of the reference counts and of the prefix map of one device.

    The first `num_reserved` blocks are never allocated (V1 keeps block 0 as the null block). A free block keeps
    its hash until it is allocated again; a hit removes it from the free blocks. Several blocks may have the
    same hash: lookups find the oldest.

    `free_blocks`: decides which free block is reused next; None: least recently freed first. `num_blocks`:
    current number, reserved ones included; ids may be higher after the pool shrank (`retired`). `num_free`:
    blocks that can be allocated now. `journal`: told of changes of the prefix map; None: no journal.
    """

    journal: PrefixJournal | None = None

    def __init__(self, num_blocks: int, *, num_reserved: int = 0, free_blocks: FreeBlocks | None = None) -> None:
        self.num_blocks = num_blocks
        self.retired: list[int] = []
        self.reserved = set(range(min(num_reserved, num_blocks)))
        self.refs = [0] * num_blocks
        self.free_blocks = free_blocks if free_blocks is not None else EvictionQueue(num_blocks, len(self.reserved))
        self.num_free = len(self.free_blocks)
        self.hash_of: list[bytes | None] = [None] * num_blocks
        self.num_hashed_tokens = [0] * num_blocks
        self.last_accessed = [NEVER_ACCESSED] * num_blocks
        self._by_hash: dict[bytes, int | list[int]] = {}
        self._num_free_hashed = 0

    @property
    def num_usable(self) -> int:
        """Blocks that can ever be allocated."""
        return self.num_blocks - len(self.reserved)

    @property
    def num_prefixes(self) -> int:
        """Number of distinct hashes in the prefix map, of blocks in use and free."""
        return len(self._by_hash)

    def counts(self) -> PoolCounts:
        """Counts for reports."""
        return PoolCounts(self.num_usable, self.num_free, self._num_free_hashed)

    def allocate(self, count: int) -> list[int]:
        """Allocate `count` blocks with one reference each, dropping their old hashes and access times. IndexError
        if too few are free.
        """
        if count > self.num_free:
            raise IndexError(f"{count} blocks requested, {self.num_free} free")
        refs, times = self.refs, self.last_accessed
        blocks = self.free_blocks.pop_many(count)
        self.num_free -= count
        for block in blocks:
            refs[block] = 1
            times[block] = NEVER_ACCESSED
        if self._num_free_hashed:
            for block in filter(self.hash_of.__getitem__, blocks):
                self._num_free_hashed -= 1
                self._forget(block)
        return blocks

    def share(self, blocks: Iterable[int]) -> None:
        """Increment each block's refcount, reviving cached free blocks. Reserved blocks are skipped."""
        refs, revived = self.refs, []
        for block in blocks:
            if not refs[block]:
                if block in self.reserved:
                    continue
                revived.append(block)
            refs[block] += 1
        if revived:
            self.free_blocks.remove(revived)
            self._count_free(revived, -1)

    def release(self, blocks: Iterable[int]) -> None:
        """Decrement each block's refcount; blocks that reach zero become free, in the order given. Reserved blocks
        are skipped.

        ValueError for a block that is free already.
        """
        refs, freed = self.refs, []
        for block in blocks:
            count = refs[block]
            if count == 1:
                refs[block] = 0
                freed.append(block)
            elif count:
                refs[block] = count - 1
            elif block not in self.reserved:
                self._free(freed)
                raise ValueError(f"block {block} is already free")
        self._free(freed)

    def place(self, source: int, placed: dict[int, int]) -> int:
        """The block that takes the contents of another pool's block `source`: a new one, or one more reference to the one
        placed before. `placed`: by source.
        """
        if source in placed:
            self.share([placed[source]])
        else:
            [placed[source]] = self.allocate(1)
        return placed[source]

    def reserve(self) -> int:
        """Take a block out of use permanently, as a placeholder that no sequence owns. IndexError if none is free."""
        [block] = self.allocate(1)
        self.refs[block] = 0
        self.reserved.add(block)
        return block

    def resize(self, num_blocks: int) -> None:
        """Change the number of blocks.

        Growing adds retired ids first, then new ones, as free blocks. Shrinking removes free blocks and their
        cached prefixes; ValueError if not enough are free.
        """
        extra = num_blocks - self.num_blocks
        if -extra > self.num_free:
            raise ValueError(f"cannot remove {-extra} blocks: {self.num_free} are free")
        self.num_blocks = num_blocks
        if extra < 0:
            gone = self.allocate(-extra)
            for block in gone:
                self.refs[block] = 0
            self.retired += gone
        elif extra:
            back, self.retired = self.retired[:extra], self.retired[extra:]
            first = len(self.refs)
            new = range(first, first + extra - len(back))
            self._add(len(new))
            self.free_blocks.grow([*back, *new])
            self.num_free += extra

    def _add(self, count: int) -> None:
        self.refs += [0] * count
        self.hash_of += [None] * count
        self.num_hashed_tokens += [0] * count
        self.last_accessed += [NEVER_ACCESSED] * count

    def cached(self) -> list[int]:
        """Free blocks that hold a cached prefix, in order of reuse."""
        return [block for block in self.free_blocks if self.hash_of[block] is not None]

    # --- prefixes ------------------------------------------------------------------------------------------------

    def register(self, block: int, block_hash: bytes, num_hashed_tokens: int = 0) -> None:
        """Register the hash of the prefix, `num_hashed_tokens` long, that a full referenced block ends.

        No-op if the block is registered already.
        """
        if self.hash_of[block] is None:
            self.num_hashed_tokens[block] = num_hashed_tokens
            self.register_all([block], [block_hash])

    def register_all(self, blocks: list[int], hashes: list[bytes]) -> None:
        """Register blocks whose order of reuse does not depend on the lengths of their prefixes."""
        hash_of, by_hash = self.hash_of, self._by_hash
        if any(map(hash_of.__getitem__, blocks)):
            for block, block_hash in zip(blocks, hashes, strict=True):
                self.register(block, block_hash)
            return
        known = list(map(by_hash.setdefault, hashes, blocks))
        for block, block_hash in zip(blocks, hashes, strict=True):
            hash_of[block] = block_hash
        if self.journal is not None:
            self.journal.changed.update(dict.fromkeys(hashes))
        if known != blocks:
            self._register_beside(blocks, hashes, known)

    def find_run(self, hashes: Iterable[bytes]) -> list[int]:
        """Blocks of the leading hashes that are cached."""
        blocks = []
        for known in map(self._by_hash.get, hashes):
            if known is None:
                break
            blocks.append(known[0] if isinstance(known, list) else known)
        return blocks

    def lookup(self, block_hash: bytes) -> int | None:
        """The block registered first with this hash, or None."""
        known = self._by_hash.get(block_hash)
        return known[0] if isinstance(known, list) else known

    def unregister(self, block: int) -> None:
        """Drop the hash of a block when its KV was never computed."""
        if self.hash_of[block] is not None:
            self._forget(block)

    def reset_prefixes(self) -> None:
        """Drop all prefixes: the memory behind the blocks was lost."""
        if self.journal is not None:
            self.journal.changed.update(dict.fromkeys(self._by_hash))
        self._by_hash.clear()
        self.hash_of = [None] * len(self.refs)
        self._num_free_hashed = 0

    def _free(self, blocks: list[int]) -> None:
        self._count_free(blocks, 1)
        self.free_blocks.extend(blocks, self)

    def _count_free(self, blocks: list[int], sign: int) -> None:
        """Count blocks that became free (1) or are used again with their contents (-1)."""
        self.num_free += sign * len(blocks)
        if self._by_hash:
            self._num_free_hashed += sign * (len(blocks) - list(map(self.hash_of.__getitem__, blocks)).count(None))

    def _register_beside(self, blocks: list[int], hashes: list[bytes], known: list[int | list[int]]) -> None:
        """Record blocks for hashes that have a block already (`known`); lookups return the older one."""
        for block, block_hash, first in zip(blocks, hashes, known, strict=True):
            if first != block:
                found = self._by_hash[block_hash]
                others = found if isinstance(found, list) else [found]
                self._by_hash[block_hash] = others if block in others else [*others, block]

    def _forget(self, block: int) -> None:
        block_hash = self.hash_of[block]
        assert block_hash is not None
        self.hash_of[block] = None
        known = self._by_hash[block_hash]
        others = [b for b in known if b != block] if isinstance(known, list) else []
        if others:
            self._by_hash[block_hash] = others if len(others) > 1 else others[0]
        else:
            del self._by_hash[block_hash]
            if self.journal is not None:
                self.journal.changed[block_hash] = None
