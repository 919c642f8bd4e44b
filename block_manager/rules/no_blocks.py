"""Cache rules for models without KV: embedding and attention-free models."""

from collections.abc import Sequence

from block_manager.cache_rules import AllocStatus, CachedSequence, Growth, Pair, PrefixHit
from block_manager.ledger import Ledger
from block_manager.pool import BlockPool


class NoBlocks:
    """Admits everything and allocates no blocks. Live sequences have empty tables, on the device or the host."""

    device_pool = None
    journals_prefixes = False
    watermark_blocks = 0
    num_free_gpu = 0
    num_free_cpu = 0
    hits = (0, 0)

    def __init__(self, *, max_model_len: int) -> None:
        self.ledger = Ledger(1, BlockPool(0), BlockPool(0))
        self.capacity_blocks = self.capacity_tokens = max_model_len

    def resize(self, num_gpu_blocks: int, num_cpu_blocks: int) -> None:
        """No-op."""

    def lookup(self, sequence: CachedSequence) -> PrefixHit:
        """Return an empty hit."""
        return PrefixHit()

    def first_key(self, sequence: CachedSequence) -> bytes | None:
        """Return None."""
        return None

    def num_cached_tokens(self, sequence: CachedSequence) -> int:
        """Return 0."""
        return 0

    def can_admit(
        self, sequences: Sequence[CachedSequence], hit: PrefixHit, num_new_tokens: int, num_lookahead: int = 0
    ) -> AllocStatus:
        """Return OK."""
        return AllocStatus.OK

    def num_blocks_to_admit(
        self, sequences: Sequence[CachedSequence], hit: PrefixHit, num_new_tokens: int, num_lookahead: int = 0
    ) -> int:
        """Return 0."""
        return 0

    def admit(
        self, sequences: Sequence[CachedSequence], hit: PrefixHit, num_new_tokens: int, num_lookahead: int = 0
    ) -> None:
        """Create empty tables."""
        self.ledger.tables.update({s.name: [] for s in sequences})

    def can_extend(self, sequences: Sequence[CachedSequence], num_new_tokens: int, num_lookahead: int = 0) -> bool:
        """Return True."""
        return True

    def fits_exactly(self, sequences: Sequence[CachedSequence], num_new_tokens: int, num_lookahead: int = 0) -> bool:
        """Return True."""
        return True

    def extend(self, sequence: CachedSequence, num_new_tokens: int, num_lookahead: int = 0) -> Growth:
        """Return no blocks."""
        return Growth()

    def fork(self, parent: CachedSequence, child: CachedSequence) -> None:
        """Create an empty table if the parent has one."""
        if parent.name in self.ledger.tables:
            self.ledger.tables[child.name] = []

    def commit(self, sequences: Sequence[CachedSequence], now: float) -> None:
        """No-op."""

    def num_computed_blocks(self, sequences: Sequence[CachedSequence]) -> int:
        """Return 0."""
        return 0

    def num_common_prefix_blocks(self, sequences: Sequence[CachedSequence]) -> int:
        """Return 0."""
        return 0

    def commit_sampled(self, sequence: CachedSequence) -> None:
        """No-op."""

    def retract(self, sequence: CachedSequence, num_computed_tokens: int) -> None:
        """No-op."""

    def can_swap_out(self, sequences: Sequence[CachedSequence]) -> bool:
        """Return True."""
        return True

    def swap_out(self, sequences: Sequence[CachedSequence]) -> list[Pair]:
        """Move the empty tables to the host."""
        self.ledger.host_tables.update({s.name: self.ledger.tables.pop(s.name) for s in sequences})
        return []

    def can_swap_in(self, sequences: Sequence[CachedSequence], num_lookahead: int = 0) -> AllocStatus:
        """Return OK."""
        return AllocStatus.OK

    def num_blocks_to_swap_in(self, sequences: Sequence[CachedSequence], num_lookahead: int = 0) -> int:
        """Return 0."""
        return 0

    def swap_in(self, sequences: Sequence[CachedSequence]) -> list[Pair]:
        """Move the empty tables to the device."""
        self.ledger.tables.update({s.name: self.ledger.host_tables.pop(s.name) for s in sequences})
        return []

    def release(self, sequence: CachedSequence) -> None:
        """Drop the table; no-op if there is none."""
        self.ledger.tables.pop(sequence.name, None)
        self.ledger.host_tables.pop(sequence.name, None)

    def forget(self, sequence: CachedSequence) -> None:
        """No-op."""

    def reset_prefixes(self) -> None:
        """No-op."""
