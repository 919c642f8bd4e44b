"""Block allocation of vLLM 0.6.3: full blocks by contents, others blank.

A key of None means contents that are never looked up; without prefix caching all keys are None, which leaves
vLLM's plain allocator.
"""

from collections.abc import Collection, Iterable, Sequence

from block_manager.pool import NEVER_ACCESSED, BlockPool


class FullBlockAllocator:
    """Owner of the computed flags of a pool's blocks and of the counts of lookups by contents.

    A block registered in this step is *touched*: it can be shared at once, but counts as computed only after
    the step.
    """

    def __init__(self, pool: BlockPool) -> None:
        self.pool = pool
        self.num_queries = 0
        self.num_hits = 0
        self._computed = [False] * pool.num_blocks
        self._touched: dict[int, None] = {}

    def allocate(self) -> int:
        """Allocate a blank block. IndexError if none is free."""
        [block] = self.pool.allocate(1)
        self._computed[block] = False
        return block

    def allocate_full(self, key: bytes | None, num_hashed_tokens: int, *, reuse: bool = True) -> int:
        """A block for contents that end a prefix of `num_hashed_tokens` tokens: the cached one, else a new
        registered one.

        `reuse` False: never the cached one. IndexError if none is free.
        """
        if key is None:
            return self.allocate()
        known = self._query(key) if reuse else None
        if known is not None:
            return self._share(known)
        block = self.allocate()
        return self.fill(block, key, num_hashed_tokens, reuse=reuse)

    def fill(self, block: int, key: bytes | None, num_hashed_tokens: int, *, reuse: bool = True) -> int:
        """A private block became full: return the cached block with the same contents and release it, or else
        register it.
        """
        if key is None:
            return block
        known = self.pool.lookup(key)
        if known is None:
            self.pool.register(block, key, num_hashed_tokens)
            self._touched[block] = None
            return block
        if not reuse:
            return block
        self.pool.release([block])
        return self._share(known)

    def copy_on_write(self, block: int) -> int:
        """Release a shared block and allocate one that may be written."""
        self.pool.release([block])
        return self.allocate()

    def is_computed(self, block: int) -> bool:
        """Whether a referenced block's KV is computed."""
        return self._computed[block]

    def is_touched(self, block: int) -> bool:
        """Whether the block is registered with contents that no planned step has written yet."""
        return block in self._touched

    def mark_computed(self, *, but: Collection[int] = ()) -> None:
        """Count touched blocks as computed, as the step that fills them is planned. `but`: blocks that a later
        step fills.
        """
        for block in self._touched:
            self._computed[block] = block not in but
        self._touched = {block: None for block in but if block in self._touched}

    def release_unfilled(self, blocks: Sequence[int]) -> None:
        """Release blocks. Those that become free before a step filled them are unregistered."""
        self.retract([block for block in blocks if block in self._touched and self.pool.refs[block] == 1])
        self.pool.release(blocks)

    def retract(self, blocks: Iterable[int]) -> None:
        """Unregister referenced blocks: their KV was never computed."""
        for block in blocks:
            self.pool.unregister(block)
            self._computed[block] = False
            self._touched.pop(block, None)

    def reset(self) -> None:
        """Drop all cached contents."""
        self.pool.reset_prefixes()
        self._computed = [False] * len(self.pool.refs)
        self._touched.clear()

    def fit_pool(self) -> None:
        """Adjust to a grown pool."""
        self._computed += [False] * (len(self.pool.refs) - len(self._computed))

    def num_touched_by(self, keys: Iterable[bytes | None]) -> int:
        """Free blocks that `allocate_full` may take for these keys, counting equal keys separately."""
        return sum(self._is_taken(key) for key in keys)

    def num_taken_by(self, keys: Iterable[bytes | None]) -> int:
        """Free blocks that `allocate_full` takes for these keys one after the other."""
        keys = list(keys)
        named = dict.fromkeys(key for key in keys if key is not None)
        return keys.count(None) + sum(self._is_taken(key) for key in named)

    def _is_taken(self, key: bytes | None) -> bool:
        known = self.pool.lookup(key) if key is not None else None
        return known is None or self.pool.refs[known] == 0

    def _query(self, key: bytes) -> int | None:
        known = self.pool.lookup(key)
        self.num_queries += 1
        self.num_hits += known is not None
        return known

    def _share(self, block: int) -> int:
        if self.pool.refs[block] == 0:
            self._computed[block] = True
            self.pool.last_accessed[block] = NEVER_ACCESSED
        self.pool.share([block])
        return block
