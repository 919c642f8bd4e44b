"""Free blocks in last-freed-first order, alone or with an evictor behind them."""

from collections.abc import Iterable, Iterator

from block_manager.compat.evictor_vllm import LruEvictor
from block_manager.pool import BlockPool


class FreeStack:
    """Free blocks without reusable contents. `blocks`: in stack order, the last is taken first."""

    def __init__(self, blocks: Iterable[int]) -> None:
        self._blocks = list(blocks)

    def __len__(self) -> int:
        return len(self._blocks)

    def __iter__(self) -> Iterator[int]:
        return reversed(self._blocks)

    def pop(self) -> int:
        """Remove and return the last freed block. IndexError when empty."""
        return self._blocks.pop()

    def pop_many(self, count: int) -> list[int]:
        """Remove and return the next `count` blocks, which must exist."""
        return [self.pop() for _ in range(count)]

    def remove(self, blocks: list[int]) -> None:
        """Remove blocks anywhere in the stack; O(n), which is fine as blocks without contents are never hit."""
        for block in blocks:
            self._blocks.remove(block)

    def extend(self, blocks: list[int], pool: BlockPool) -> None:
        """Add freed blocks."""
        self._blocks += blocks

    def grow(self, blocks: list[int]) -> None:
        """Add blocks at the bottom."""
        self._blocks[:0] = reversed(blocks)


class StackThenEvictor:
    """Blank blocks first; when there are none, the evictor chooses the contents to overwrite.

    `keep_all`: every freed block goes to the evictor (2023); otherwise only blocks that hold a cached prefix
    (0.6.3).
    """

    def __init__(self, blocks: Iterable[int], *, keep_all: bool) -> None:
        self._blank = FreeStack(blocks)
        self._keep_all = keep_all
        self.evictor = LruEvictor()

    def __len__(self) -> int:
        return len(self._blank) + len(self.evictor)

    def __iter__(self) -> Iterator[int]:
        yield from self._blank
        yield from self.evictor

    def pop(self) -> int:
        """Remove and return a blank block, else evict one. IndexError when empty."""
        if len(self._blank):
            return self._blank.pop()
        if not len(self.evictor):
            raise IndexError("no free block")
        return self.evictor.evict()

    def pop_many(self, count: int) -> list[int]:
        """Remove and return the next `count` blocks, which must exist."""
        return [self.pop() for _ in range(count)]

    def remove(self, blocks: list[int]) -> None:
        """Remove freed blocks from the evictor, on a hit."""
        for block in blocks:
            self.evictor.remove(block)

    def extend(self, blocks: list[int], pool: BlockPool) -> None:
        """Add freed blocks."""
        for block in blocks:
            if self._keep_all or pool.hash_of[block] is not None:
                self.evictor.add(block, pool.num_hashed_tokens[block], pool.last_accessed[block])
            else:
                self._blank.extend([block], pool)

    def grow(self, blocks: list[int]) -> None:
        """Add blank blocks."""
        self._blank.grow(blocks)
