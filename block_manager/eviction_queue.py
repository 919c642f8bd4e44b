"""Free blocks of one pool in the order in which cached prefixes are evicted: least recently freed first.

Every operation is O(1) except `grow`. The rules of vLLM 2023 and 0.6.3 use `compat/evictor_vllm`.
"""

from collections.abc import Iterator


class EvictionQueue:
    """Doubly linked queue of block ids 0..num_blocks-1; allocation takes the head, freed blocks are appended at
    the tail.

    It only keeps the order; the pool decides which blocks are free.
    """

    def __init__(self, num_blocks: int, first: int = 0) -> None:
        """Start with blocks first..num_blocks-1 free, in ascending order."""
        self._end = num_blocks
        self._next = [*list(range(1, num_blocks + 1)), first]
        self._prev = [-1, *range(num_blocks)]
        self._prev[first] = self._end
        self._next[self._end] = first
        self._prev[self._end] = num_blocks - 1
        self._len = num_blocks - first
        if not self._len:
            self._next[self._end] = self._prev[self._end] = self._end

    def __len__(self) -> int:
        return self._len

    def __iter__(self) -> Iterator[int]:
        following, block = self._next, self._next[self._end]
        while block != self._end:
            yield block
            block = following[block]

    def pop_many(self, count: int) -> list[int]:
        """Remove and return the first `count` blocks, which must exist."""
        assert count <= self._len
        following, block = self._next, self._end
        blocks = [block := following[block] for _ in range(count)]
        after = following[block]
        following[self._end], self._prev[after] = after, self._end
        self._len -= count
        return blocks

    def grow(self, blocks: list[int]) -> None:
        """Append more blocks, with existing ids or new ones, in this order. O(number of all blocks)."""
        order = [*self, *blocks]
        num_blocks = max([self._end, *(block + 1 for block in blocks)])
        grown = EvictionQueue(num_blocks, num_blocks)
        grown.extend(order)
        vars(self).update(vars(grown))

    def remove(self, blocks: list[int]) -> None:
        """Remove blocks anywhere in the queue (a prefix hit on free blocks)."""
        following, before = self._next, self._prev
        for block in blocks:
            following[before[block]], before[following[block]] = following[block], before[block]
        self._len -= len(blocks)

    def extend(self, blocks: list[int], pool: object = None) -> None:
        """Append freed blocks at the tail, whatever they hold."""
        following, before = self._next, self._prev
        last = before[self._end]
        for block in blocks:
            following[last], before[block] = block, last
            last = block
        following[last], before[self._end] = self._end, last
        self._len += len(blocks)
