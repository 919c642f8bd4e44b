"""How far a sequence's table is written, and what writing on takes (R66, R68)."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from block_manager.cache_rules import CachedSequence
from block_manager.rules.computed_prefix import ComputedPrefix


@dataclass(slots=True)
class Written:
    """`num_tokens` of the sequence are in its table, whose first `num_dropped` entries are the null block (R105).

    `last_accessed`: when a step last held it; None: never.
    """

    num_tokens: int
    num_dropped: int = 0
    last_accessed: float | None = None
    computed: ComputedPrefix = field(default_factory=ComputedPrefix)

    def fork(self) -> "Written":
        """That of a child with the same table: nothing of it is known to be accessed or computed yet."""
        return Written(self.num_tokens, self.num_dropped)

    def num_touched(self, sequence: CachedSequence, block_size: int, num_lookahead: int) -> int:
        """Blocks that unseen tokens and lookahead slots fall into. The partial last block counts even when nothing falls into
        it; a full one does not (R66)."""
        num_slots = len(sequence.token_ids) - self.num_tokens + num_lookahead
        room = block_size - self.num_tokens % block_size
        return 1 - (room - num_slots) // block_size

    def num_taken(
        self, sequence: CachedSequence, table: list[int], refs: Sequence[int], block_size: int, num_lookahead: int
    ) -> int:
        """Blocks that the next append takes from the pool: new ones, and copies of shared ones that are written to."""
        num_tokens = len(sequence.token_ids)
        new = max(0, -(-(num_tokens + num_lookahead) // block_size) - len(table))
        end = min(len(table), -(-num_tokens // block_size))
        return new + sum(refs[block] > 1 for block in table[self.num_tokens // block_size : end])
