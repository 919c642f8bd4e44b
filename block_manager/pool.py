"""Blocks of one device: reference counts, free order, and which of them hold a known prefix."""

from collections.abc import Iterable
from dataclasses import dataclass

from block_manager.free_queue import FreeQueue


@dataclass(frozen=True, slots=True)
class PoolCounts:
    """`total` blocks that sequences can use; `free` of them unreferenced; `cached` of the free ones hold a known prefix."""

    total: int
    free: int
    cached: int


class BlockPool:
    """Owner of reference counts and of the prefix map of one device (R99, R109, R110, R137).

    The first `num_reserved` blocks are never handed out (V1 keeps block 0 as the null block). A free block keeps its hash until
    it is allocated again; a hit takes it out of the free queue. Two blocks may carry one hash: lookups find the older one.
    """

    def __init__(self, num_blocks: int, *, num_reserved: int = 0) -> None:
        self.num_blocks = num_blocks
        self.num_reserved = min(num_reserved, num_blocks)
        self.refs = [0] * num_blocks
        self.free_queue = FreeQueue(num_blocks, self.num_reserved)
        self.hash_of: list[bytes | None] = [None] * num_blocks
        self._by_hash: dict[bytes, dict[int, None]] = {}
        self._num_free_hashed = 0

    @property
    def num_free(self) -> int:
        """Blocks that can be allocated now."""
        return len(self.free_queue)

    @property
    def num_usable(self) -> int:
        """Blocks that can ever be allocated."""
        return self.num_blocks - self.num_reserved

    def counts(self) -> PoolCounts:
        """Figures for reports."""
        return PoolCounts(self.num_usable, self.num_free, self._num_free_hashed)

    def allocate(self, count: int) -> list[int]:
        """`count` blocks with one reference each, oldest freed first; their old hashes are dropped. IndexError when short."""
        if count > self.num_free:
            raise IndexError(f"{count} blocks wanted, {self.num_free} free")
        blocks = [self.free_queue.pop() for _ in range(count)]
        for block in blocks:
            self.refs[block] = 1
            if self.hash_of[block] is not None:
                self._num_free_hashed -= 1
                self._forget(block)
        return blocks

    def share(self, blocks: Iterable[int]) -> None:
        """One more reference each; a free block comes back to life with its contents."""
        for block in blocks:
            if self.refs[block] == 0:
                self.free_queue.remove(block)
                self._num_free_hashed -= self.hash_of[block] is not None
            self.refs[block] += 1

    def release(self, blocks: Iterable[int]) -> None:
        """One reference less each; at zero the block goes to the tail of the free queue, in the order given (R17)."""
        for block in blocks:
            assert self.refs[block] > 0, f"block {block} is freed twice"
            self.refs[block] -= 1
            if self.refs[block] == 0:
                self.free_queue.append(block)
                self._num_free_hashed += self.hash_of[block] is not None

    # --- prefixes ------------------------------------------------------------------------------------------------

    def register(self, block: int, block_hash: bytes) -> None:
        """Says which prefix a referenced, full block ends."""
        if self.hash_of[block] is None:
            self.hash_of[block] = block_hash
            self._by_hash.setdefault(block_hash, {})[block] = None

    def lookup(self, block_hash: bytes) -> int | None:
        """A block with this hash, the one registered first, or None."""
        blocks = self._by_hash.get(block_hash)
        return next(iter(blocks)) if blocks else None

    def unregister(self, block: int) -> None:
        """What a referenced block was registered for never came to be in it."""
        if self.hash_of[block] is not None:
            self._forget(block)

    def reset_prefixes(self) -> None:
        """Forgets every prefix: the memory behind the blocks is gone."""
        self._by_hash.clear()
        self.hash_of = [None] * self.num_blocks
        self._num_free_hashed = 0

    def _forget(self, block: int) -> None:
        block_hash = self.hash_of[block]
        assert block_hash is not None
        self.hash_of[block] = None
        blocks = self._by_hash[block_hash]
        del blocks[block]
        if not blocks:
            del self._by_hash[block_hash]
