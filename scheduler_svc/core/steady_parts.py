"""What the fast path asks of progress and cache rules besides what every path asks."""

from collections.abc import Sequence as Items
from typing import Protocol

from block_manager.cache_rules import CachedSequence
from scheduler_svc.core.steady import Ints, SteadyRows


class RowProgress(Protocol):
    """A progress that can count by columns; each method does for rows what its namesake does for a sequence."""

    def num_pending_rows(self, rows: SteadyRows) -> Ints:
        """`num_pending` of every row."""

    def on_scheduled_rows(self, rows: SteadyRows, scheduled: Ints) -> None:
        """Those rows are in a plan, with one token each."""

    def on_tokens_rows(self, rows: SteadyRows, given: Ints) -> None:
        """Those rows got their token; called after it was appended."""

    def settled_rows(self, rows: SteadyRows, given: Ints) -> Ints | None:
        """Up to how many tokens each of them may be found by others now; None where that is left to the next step."""


class RowCache(Protocol):
    """Cache rules that can give blocks one by one, cheaply."""

    @property
    def num_free_gpu(self) -> int:
        """Free device blocks."""

    def append_blocks(self, sequences: Items[CachedSequence]) -> list[int]:
        """One more block for each, in order."""

    def register(self, sequence: CachedSequence, num_tokens: int) -> int:
        """Full blocks among its first `num_tokens` can be found; at how many tokens the next one will be full."""

    def capacity_of(self, sequence: CachedSequence) -> int:
        """Tokens that its table can hold."""

    def num_blocks_needed(self, sequence: CachedSequence, num_new_tokens: int) -> int:
        """Blocks that so many more tokens take."""


def register_row(rows: SteadyRows, row: int, cache: RowCache) -> None:
    """The block that this row has filled can be found."""
    sequence = rows.members[row].sequences[0]
    rows.next_full[row] = cache.register(sequence, int(rows.next_full[row]))
