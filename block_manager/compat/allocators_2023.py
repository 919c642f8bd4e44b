"""Block allocation of the 2023 vLLM block manager: plain, or with a key for every block."""

from collections.abc import Iterable
from typing import Protocol

from block_manager.pool import BlockPool


class Allocator(Protocol):
    """Allocates single blocks of a pool. `num_queries`, `num_hits`: allocations so far, and those that hit cached
    contents.
    """

    pool: BlockPool
    num_queries: int
    num_hits: int

    def allocate(self, key: bytes | None = None, num_hashed_tokens: int = 0) -> int:
        """A block for these contents, with one more reference. IndexError if none is free."""

    def release(self, block: int) -> None:
        """Decrement its refcount. ValueError if it is free already."""

    def promote(self, block: int, key: bytes) -> int:
        """A private block became full: returns the block to continue with."""

    def is_computed(self, block: int) -> bool:
        """Whether its KV is computed."""

    def mark_computed(self, block: int) -> None:
        """Mark its KV as computed."""

    def retract(self, blocks: Iterable[int]) -> None:
        """Unregister referenced blocks: their KV was never computed."""

    def reset(self) -> None:
        """Drop all cached contents."""

    def fit_pool(self) -> None:
        """Adjust to a grown pool."""


class UncachedAllocator:
    """Last freed block first; no contents are cached."""

    def __init__(self, pool: BlockPool) -> None:
        self.pool = pool
        self.num_queries = 0
        self.num_hits = 0

    def allocate(self, key: bytes | None = None, num_hashed_tokens: int = 0) -> int:
        """Allocate a blank block. IndexError if none is free."""
        [block] = self.pool.allocate(1)
        return block

    def release(self, block: int) -> None:
        """Decrement its refcount. ValueError if it is free already."""
        self.pool.release([block])

    def promote(self, block: int, key: bytes) -> int:
        """Return the block itself."""
        return block

    def is_computed(self, block: int) -> bool:
        """Return False: nothing is recorded."""
        return False

    def mark_computed(self, block: int) -> None:
        """No-op."""

    def retract(self, blocks: Iterable[int]) -> None:
        """No-op."""

    def reset(self) -> None:
        """No-op."""

    def fit_pool(self) -> None:
        """No-op."""


class CachedAllocator:
    """Every block has a key; blocks that cannot be shared get a private key from a counter.

    Freed blocks go to the evictor with their contents. A swapped block keeps its key, even a private one, so it
    is found again where its contents are still present.
    """

    def __init__(self, pool: BlockPool) -> None:
        self.pool = pool
        self.num_queries = 0
        self.num_hits = 0
        self._computed = [False] * pool.num_blocks
        self._num_private = 0

    def allocate(self, key: bytes | None = None, num_hashed_tokens: int = 0) -> int:
        """The block with this key, in use or freed; else a new or evicted one under this key. IndexError if none
        is free.
        """
        key = self._private_key() if key is None else key
        self.num_queries += 1
        known = self.pool.lookup(key)
        if known is not None:
            self.num_hits += 1
            self.pool.share([known])
            return known
        [block] = self.pool.allocate(1)
        self._computed[block] = False
        self.pool.register(block, key, num_hashed_tokens)
        return block

    def release(self, block: int) -> None:
        """Decrement its refcount. ValueError if it is free already."""
        self.pool.release([block])

    def promote(self, block: int, key: bytes) -> int:
        """A private block became full: use the cached block with the same contents, or else re-key it by its contents."""
        if self.pool.lookup(key) is not None:
            self.release(block)
            return self.allocate(key)
        self._rename(block, key)
        return block

    def is_computed(self, block: int) -> bool:
        """Whether its KV is computed; eviction resets that."""
        return self._computed[block]

    def mark_computed(self, block: int) -> None:
        """Mark its KV as computed."""
        self._computed[block] = True

    def retract(self, blocks: Iterable[int]) -> None:
        """Give the blocks private keys and mark them as not computed."""
        for block in blocks:
            self._rename(block, self._private_key())
            self._computed[block] = False

    def reset(self) -> None:
        """Drop all cached contents."""
        self.pool.reset_prefixes()
        self._computed = [False] * len(self.pool.refs)

    def fit_pool(self) -> None:
        """Adjust to a grown pool."""
        self._computed += [False] * (len(self.pool.refs) - len(self._computed))

    def _rename(self, block: int, key: bytes) -> None:
        num_hashed_tokens = self.pool.num_hashed_tokens[block]
        self.pool.unregister(block)
        self.pool.register(block, key, num_hashed_tokens)

    def _private_key(self) -> bytes:
        self._num_private += 1
        return b"private" + self._num_private.to_bytes(8, "little")
