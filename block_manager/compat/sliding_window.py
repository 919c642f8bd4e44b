"""Sliding-window attention in vLLM 0.6.3: blocks outside the window are replaced by one null block."""

from block_manager.ledger import Ledger


class SlidingWindow:
    """Owner of the null block, which is taken from the device pool at the first append, permanently, and shared by
    all tables.

    `num_blocks`: the most blocks that a sequence needs. `exact`: frees all blocks outside the window; otherwise
    keeps the last `num_blocks` * block size tokens, as vLLM 0.6.3 does.
    """

    def __init__(self, ledger: Ledger, num_tokens: int, *, exact: bool) -> None:
        self._ledger = ledger
        self._null: int | None = None
        self.num_blocks = num_tokens // ledger.block_size + 2
        self._num_kept_tokens = num_tokens - 1 if exact else self.num_blocks * ledger.block_size

    @property
    def num_missing(self) -> int:
        """Blocks still to be taken from the pool: 1 until the null block is allocated."""
        return int(self._null is None)

    def num_out_of_sight(self, num_computed_tokens: int) -> int:
        """Leading blocks outside the window of the next token."""
        return max(0, num_computed_tokens - self._num_kept_tokens) // self._ledger.block_size

    def drop(self, table: list[int], num_dropped: int, num_computed_tokens: int) -> int:
        """Free blocks outside the window, lowest first, behind the `num_dropped` null entries. Returns the new
        number of those.
        """
        null = self._take()
        end = max(num_dropped, min(self.num_out_of_sight(num_computed_tokens), len(table)))
        for i in range(num_dropped, end):
            self._ledger.gpu.release([table[i]])
            table[i] = null
        return end

    def placeholders(self, count: int) -> list[int]:
        """Null-block entries for blocks that were dropped before."""
        return [self._take()] * count if count else []

    def _take(self) -> int:
        if self._null is None:
            self._null = self._ledger.gpu.reserve()
        return self._null
