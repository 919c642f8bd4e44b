"""Blocks of one device as 0.6.3 hands them out: full ones by their contents, others blank (R112, R117, R118).

A key of None stands for contents that nobody looks up; without prefix caching all keys are None, and what is left is the plain
allocator (R99, R106).
"""

from collections.abc import Collection, Iterable, Sequence

from block_manager.pool import NEVER_ACCESSED, BlockPool


class FullBlockAllocator:
    """Owner of which blocks of a pool are computed, and of the count of lookups by contents.

    A block registered in this step is *touched*: it can be shared at once, but counts as computed only after the step.
    """

    def __init__(self, pool: BlockPool) -> None:
        self.pool = pool
        self.num_queries = 0
        self.num_hits = 0
        self._computed = [False] * pool.num_blocks
        self._touched: dict[int, None] = {}

    def allocate(self) -> int:
        """A blank block. IndexError when there is none."""
        [block] = self.pool.allocate(1)
        self._computed[block] = False
        return block

    def allocate_full(self, key: bytes | None, num_hashed_tokens: int, *, reuse: bool = True) -> int:
        """A block for contents that end a prefix of `num_hashed_tokens` tokens: a known one, else a new one that is known from now
        on (R117). Not `reuse`: never a known one. IndexError when there is none."""
        if key is None:
            return self.allocate()
        known = self._query(key) if reuse else None
        if known is not None:
            return self._share(known)
        block = self.allocate()
        return self.fill(block, key, num_hashed_tokens, reuse=reuse)

    def fill(self, block: int, key: bytes | None, num_hashed_tokens: int, *, reuse: bool = True) -> int:
        """A private block became full: where its contents are known, the known block instead, else it is known now (R118)."""
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
        """A shared block is given up for one that may be written (R20)."""
        self.pool.release([block])
        return self.allocate()

    def is_computed(self, block: int) -> bool:
        """Whether a referenced block's KV is known to be there."""
        return self._computed[block]

    def is_touched(self, block: int) -> bool:
        """Whether it is known by contents that no planned step put into it yet."""
        return block in self._touched

    def mark_computed(self, *, but: Collection[int] = ()) -> None:
        """The step that fills what was touched is planned (R93). `but`: blocks that a later step fills."""
        for block in self._touched:
            self._computed[block] = block not in but
        self._touched = {block: None for block in but if block in self._touched}

    def release_unfilled(self, blocks: Sequence[int]) -> None:
        """One reference less each. What goes free before a step filled it is not known any more."""
        self.retract([block for block in blocks if block in self._touched and self.pool.refs[block] == 1])
        self.pool.release(blocks)

    def retract(self, blocks: Iterable[int]) -> None:
        """What these referenced blocks were to hold never came to be in them."""
        for block in blocks:
            self.pool.unregister(block)
            self._computed[block] = False
            self._touched.pop(block, None)

    def reset(self) -> None:
        """No contents are known any more."""
        self.pool.reset_prefixes()
        self._computed = [False] * len(self.pool.refs)
        self._touched.clear()

    def fit_pool(self) -> None:
        """The pool may have more blocks now."""
        self._computed += [False] * (len(self.pool.refs) - len(self._computed))

    def num_touched_by(self, keys: Iterable[bytes | None]) -> int:
        """Blocks that `allocate_full` of all these may take from the free ones, equal ones not joined (R72)."""
        return sum(self._is_taken(key) for key in keys)

    def num_taken_by(self, keys: Iterable[bytes | None]) -> int:
        """Blocks that `allocate_full` of all these, one after the other, does take."""
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
