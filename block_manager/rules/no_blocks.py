"""Placeholder cache rules for models that keep no KV: embedding and attention-free ones (R34)."""

from collections.abc import Iterable, Sequence

from block_manager.cache_rules import AllocStatus, CachedSequence, Growth, Pair, PrefixHit
from block_manager.ledger import Ledger
from block_manager.pool import BlockPool


class NoBlocks:
    """Everything is always possible and takes no blocks. Live sequences have empty tables, on the device or the host."""

    watermark_blocks = 0
    num_free_gpu = 0
    num_free_cpu = 0
    hits = (0, 0)

    def __init__(self, *, max_model_len: int) -> None:
        self.ledger = Ledger(1, BlockPool(0), BlockPool(0))
        self.capacity_tokens = max_model_len

    def resize(self, num_gpu_blocks: int, num_cpu_blocks: int) -> None:
        """Nothing to change."""

    def lookup(self, sequence: CachedSequence) -> PrefixHit:
        """Nothing."""
        return PrefixHit()

    def can_admit(
        self, sequences: Sequence[CachedSequence], hit: PrefixHit, num_new_tokens: int, num_lookahead: int = 0
    ) -> AllocStatus:
        """Yes."""
        return AllocStatus.OK

    def num_blocks_to_admit(
        self, sequences: Sequence[CachedSequence], hit: PrefixHit, num_new_tokens: int, num_lookahead: int = 0
    ) -> int:
        """None."""
        return 0

    def admit(
        self, sequences: Sequence[CachedSequence], hit: PrefixHit, num_new_tokens: int, num_lookahead: int = 0
    ) -> None:
        """Empty tables."""
        self.ledger.tables.update({s.name: [] for s in sequences})

    def can_extend(self, sequences: Sequence[CachedSequence], num_new_tokens: int, num_lookahead: int = 0) -> bool:
        """Yes."""
        return True

    def fits_exactly(self, sequences: Sequence[CachedSequence], num_new_tokens: int, num_lookahead: int = 0) -> bool:
        """Yes."""
        return True

    def extend(self, sequence: CachedSequence, num_new_tokens: int, num_lookahead: int = 0) -> Growth:
        """No blocks."""
        return Growth()

    def fork(self, parent: CachedSequence, child: CachedSequence) -> None:
        """An empty table, if the parent has one (R102)."""
        if parent.name in self.ledger.tables:
            self.ledger.tables[child.name] = []

    def commit(self, sequences: Iterable[CachedSequence], now: float) -> None:
        """Nothing to note."""

    def num_computed_blocks(self, sequences: Sequence[CachedSequence]) -> int:
        """0."""
        return 0

    def num_common_prefix_blocks(self, sequences: Sequence[CachedSequence]) -> int:
        """0."""
        return 0

    def settle(self, sequence: CachedSequence) -> None:
        """Nothing to register."""

    def retract(self, sequence: CachedSequence, num_computed_tokens: int) -> None:
        """Nothing was registered."""

    def can_swap_out(self, sequences: Sequence[CachedSequence]) -> bool:
        """Yes."""
        return True

    def swap_out(self, sequences: Sequence[CachedSequence]) -> list[Pair]:
        """Moves empty tables."""
        self.ledger.host_tables.update({s.name: self.ledger.tables.pop(s.name) for s in sequences})
        return []

    def can_swap_in(self, sequences: Sequence[CachedSequence], num_lookahead: int = 0) -> AllocStatus:
        """Yes."""
        return AllocStatus.OK

    def num_blocks_to_swap_in(self, sequences: Sequence[CachedSequence], num_lookahead: int = 0) -> int:
        """Tables are empty."""
        return 0

    def swap_in(self, sequences: Sequence[CachedSequence]) -> list[Pair]:
        """Moves empty tables."""
        self.ledger.tables.update({s.name: self.ledger.host_tables.pop(s.name) for s in sequences})
        return []

    def release(self, sequence: CachedSequence) -> None:
        """Drops the table; none: no-op (R97)."""
        self.ledger.tables.pop(sequence.name, None)
        self.ledger.host_tables.pop(sequence.name, None)

    def forget(self, sequence: CachedSequence) -> None:
        """Nothing was remembered."""

    def reset_prefixes(self) -> None:
        """There are none."""

    def try_reset_prefixes(self) -> bool:
        """True: no block is ever in use."""
        return True
