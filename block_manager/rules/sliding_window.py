"""Sliding-window attention in 0.6.3: blocks that no token looks at any more give way to one null block (R105)."""

from block_manager.ledger import Ledger


class SlidingWindow:
    """Owner of the null block: taken from the device pool at the first append of the run, for good, and shared by all tables.

    `num_blocks`: the most that a sequence needs. `exact`: frees all that is out of sight; else one window less, as recorded.
    """

    def __init__(self, ledger: Ledger, num_tokens: int, *, exact: bool) -> None:
        self._ledger = ledger
        self._null: int | None = None
        self.num_blocks = num_tokens // ledger.block_size + 2
        self._num_kept_tokens = num_tokens - 1 if exact else self.num_blocks * ledger.block_size

    @property
    def num_missing(self) -> int:
        """Blocks it still has to take from the pool: the null block, or none."""
        return int(self._null is None)

    def num_out_of_sight(self, num_computed_tokens: int) -> int:
        """Leading blocks that the next token does not look at."""
        return max(0, num_computed_tokens - self._num_kept_tokens) // self._ledger.block_size

    def drop(self, table: list[int], num_dropped: int, num_computed_tokens: int) -> int:
        """Frees what is out of sight, lowest first, behind the `num_dropped` entries that are null already; how many are now."""
        null = self._take()
        end = max(num_dropped, min(self.num_out_of_sight(num_computed_tokens), len(table)))
        for i in range(num_dropped, end):
            self._ledger.gpu.release([table[i]])
            table[i] = null
        return end

    def placeholders(self, count: int) -> list[int]:
        """Entries for blocks that were dropped before."""
        return [self._take()] * count if count else []

    def _take(self) -> int:
        if self._null is None:
            self._null = self._ledger.gpu.reserve()
        return self._null
