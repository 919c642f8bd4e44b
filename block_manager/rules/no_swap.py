"""The part of the cache rules that says: groups never move to the host here; who must leave is computed again (R131)."""

from collections.abc import Sequence

from block_manager.cache_rules import AllocStatus, CachedSequence, Pair


class NoSwap:
    """Base of cache rules without swapping. Asking is fine; doing it anyway is a bug of the caller."""

    def can_swap_out(self, sequences: Sequence[CachedSequence]) -> bool:
        """Never."""
        return False

    def swap_out(self, sequences: Sequence[CachedSequence]) -> list[Pair]:
        """AssertionError."""
        raise AssertionError("these cache rules do not swap")

    def can_swap_in(self, sequences: Sequence[CachedSequence], num_lookahead: int = 0) -> AllocStatus:
        """Never."""
        return AllocStatus.NEVER

    def num_blocks_to_swap_in(self, sequences: Sequence[CachedSequence], num_lookahead: int = 0) -> int:
        """Nothing is there to come back."""
        return 0

    def swap_in(self, sequences: Sequence[CachedSequence]) -> list[Pair]:
        """AssertionError."""
        raise AssertionError("these cache rules do not swap")
