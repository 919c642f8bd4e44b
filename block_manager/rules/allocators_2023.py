"""Blocks of one device as the 2023 manager hands them out: plain, or every one addressed by a key (R99, R106, R109, R110)."""

from collections.abc import Iterable
from typing import Protocol

from block_manager.pool import BlockPool


class Allocator(Protocol):
    """Hands out single blocks of a pool. `num_queries`, `num_hits`: allocations so far, and those that found known contents."""

    pool: BlockPool
    num_queries: int
    num_hits: int

    def allocate(self, key: bytes | None = None, num_hashed_tokens: int = 0) -> int:
        """A block for these contents, with one reference more. IndexError when there is none."""

    def release(self, block: int) -> None:
        """One reference less. ValueError when it is free already."""

    def promote(self, block: int, key: bytes) -> int:
        """A private block became full: the block to go on with."""

    def is_computed(self, block: int) -> bool:
        """Whether its KV is known to be there."""

    def mark_computed(self, block: int) -> None:
        """Its KV is there."""

    def retract(self, blocks: Iterable[int]) -> None:
        """What these referenced blocks were to hold never came to be in them."""

    def reset(self) -> None:
        """No contents are known any more."""

    def fit_pool(self) -> None:
        """The pool may have more blocks now."""


class UncachedAllocator:
    """The last freed block first; no contents are known (R99)."""

    def __init__(self, pool: BlockPool) -> None:
        self.pool = pool
        self.num_queries = 0
        self.num_hits = 0

    def allocate(self, key: bytes | None = None, num_hashed_tokens: int = 0) -> int:
        """A blank block. IndexError when there is none."""
        [block] = self.pool.allocate(1)
        return block

    def release(self, block: int) -> None:
        """One reference less. ValueError when it is free already."""
        self.pool.release([block])

    def promote(self, block: int, key: bytes) -> int:
        """The block itself."""
        return block

    def is_computed(self, block: int) -> bool:
        """Nothing is known of it."""
        return False

    def mark_computed(self, block: int) -> None:
        """Nothing is noted."""

    def retract(self, blocks: Iterable[int]) -> None:
        """Nothing was known of them."""

    def reset(self) -> None:
        """There are none."""

    def fit_pool(self) -> None:
        """Nothing is noted of any."""


class CachedAllocator:
    """Every block has a key; one that nobody else could know gets a private key from a counter (R109, R113).

    Freed blocks go to the evictor with their contents (R110). A swapped block keeps its key, the private one included, so it
    is found again where its contents still lie.
    """

    def __init__(self, pool: BlockPool) -> None:
        self.pool = pool
        self.num_queries = 0
        self.num_hits = 0
        self._computed = [False] * pool.num_blocks
        self._num_private = 0

    def allocate(self, key: bytes | None = None, num_hashed_tokens: int = 0) -> int:
        """The block with this key, in use or freed; else a new or evicted one that has it now. IndexError when there is none."""
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
        """One reference less. ValueError when it is free already."""
        self.pool.release([block])

    def promote(self, block: int, key: bytes) -> int:
        """A private block became full: the known block with its contents instead, else it goes by its contents now (R113)."""
        if self.pool.lookup(key) is not None:
            self.release(block)
            return self.allocate(key)
        self._rename(block, key)
        return block

    def is_computed(self, block: int) -> bool:
        """Whether its KV is there; eviction ends that (R115)."""
        return self._computed[block]

    def mark_computed(self, block: int) -> None:
        """Its KV is there."""
        self._computed[block] = True

    def retract(self, blocks: Iterable[int]) -> None:
        """They go by private keys now and are not computed."""
        for block in blocks:
            self._rename(block, self._private_key())
            self._computed[block] = False

    def reset(self) -> None:
        """No contents are known any more."""
        self.pool.reset_prefixes()
        self._computed = [False] * len(self.pool.refs)

    def fit_pool(self) -> None:
        """The pool may have more blocks now."""
        self._computed += [False] * (len(self.pool.refs) - len(self._computed))

    def _rename(self, block: int, key: bytes) -> None:
        num_hashed_tokens = self.pool.num_hashed_tokens[block]
        self.pool.unregister(block)
        self.pool.register(block, key, num_hashed_tokens)

    def _private_key(self) -> bytes:
        self._num_private += 1
        return b"private" + self._num_private.to_bytes(8, "little")
