"""Freed blocks whose contents may be reused: who goes first (R111)."""

from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(slots=True)
class _Entry:
    num_hashed_tokens: int
    last_accessed: float


class LruEvictor:
    """Least recently accessed block first, among equals the one that ends the longest prefix, then the first added.

    As the reference does, only the front of the table, in order of adding, is looked at: the scan ends at the first entry that
    was accessed later than the candidate. Where times grow with the order of adding this is plain LRU.
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
        """Takes in a block that nobody references any more."""
        self._entries[block] = _Entry(num_hashed_tokens, last_accessed)

    def update(self, block: int, last_accessed: float) -> None:
        """Writes its time; its place in the table stays. ValueError when it is not there."""
        if block not in self._entries:
            raise ValueError(f"block {block} is not in the evictor")
        self._entries[block].last_accessed = last_accessed

    def remove(self, block: int) -> None:
        """Takes a block back to life. ValueError when it is not there."""
        if self._entries.pop(block, None) is None:
            raise ValueError(f"block {block} is not in the evictor")

    def evict(self) -> int:
        """Takes out the block to overwrite. ValueError when empty."""
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
