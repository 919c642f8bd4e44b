"""LRU evictor of freed blocks with reusable contents, for the rules of vLLM 2023 and 0.6.3.

The other rules evict in the order of `block_manager.eviction_queue`.
"""

from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(slots=True)
class _Entry:
    num_hashed_tokens: int
    last_accessed: float


class LruEvictor:
    """Evict the least recently accessed block; ties: the one that ends the longest prefix, then the first added.

    Like vLLM's LRUEvictor, the scan in order of adding ends at the first entry accessed later than the
    candidate. Where access times grow with the order of adding this is plain LRU.
    """

    def __init__(self) -> None:
        self._entries: dict[int, _Entry] = {}

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, block: int) -> bool:
        return block in self._entries

    def __iter__(self) -> Iterator[int]:
        return iter(self._entries)

    def add(self, block: int, num_hashed_tokens: int, last_accessed: float) -> None:
        """Add an unreferenced block."""
        self._entries[block] = _Entry(num_hashed_tokens, last_accessed)

    def update(self, block: int, last_accessed: float) -> None:
        """Set a block's access time; its position is unchanged. ValueError if it is not there."""
        if block not in self._entries:
            raise ValueError(f"block {block} is not in the evictor")
        self._entries[block].last_accessed = last_accessed

    def remove(self, block: int) -> None:
        """Remove a block that is used again. ValueError if it is not there."""
        if self._entries.pop(block, None) is None:
            raise ValueError(f"block {block} is not in the evictor")

    def evict(self) -> int:
        """Remove and return the block to overwrite. ValueError when empty."""
        if not self._entries:
            raise ValueError("no block to evict")
        entries = iter(self._entries.items())
        block, best = next(entries)
        for other, entry in entries:
            if best.last_accessed < entry.last_accessed:
                break
            if best.num_hashed_tokens < entry.num_hashed_tokens:
                block, best = other, entry
        del self._entries[block]
        return block
