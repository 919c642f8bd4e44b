"""Base of cache rules without swap: preempted groups are always recomputed."""

from collections.abc import Sequence

from block_manager.cache_rules import AllocStatus, CachedSequence, Pair


class NoSwap:
    """Cache rules without swap. The questions may be asked; calling `swap_out` or `swap_in` is a bug of the caller."""

    def can_swap_out(self, sequences: Sequence[CachedSequence]) -> bool:
        """Return False."""
        return False

    def swap_out(self, sequences: Sequence[CachedSequence]) -> list[Pair]:
        """Raise AssertionError."""
        raise AssertionError("these cache rules do not swap")

    def can_swap_in(self, sequences: Sequence[CachedSequence], num_lookahead: int = 0) -> AllocStatus:
        """Return NEVER."""
        return AllocStatus.NEVER

    def num_blocks_to_swap_in(self, sequences: Sequence[CachedSequence], num_lookahead: int = 0) -> int:
        """Return 0."""
        return 0

    def swap_in(self, sequences: Sequence[CachedSequence]) -> list[Pair]:
        """Raise AssertionError."""
        raise AssertionError("these cache rules do not swap")
