"""How far a sequence's block table is written, and the blocks that further writing takes."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from block_manager.cache_rules import CachedSequence
from block_manager.compat.computed_prefix import ComputedPrefix


@dataclass(slots=True)
class Written:
    """`num_tokens` of the sequence are in its table; the first `num_dropped` entries are the null block.

    `last_accessed`: time of the last step that held it; None: never.
    """

    num_tokens: int
    num_dropped: int = 0
    last_accessed: float | None = None
    computed: ComputedPrefix = field(default_factory=ComputedPrefix)

    def fork(self) -> "Written":
        """State of a forked child with the same table: not accessed and no computed blocks recorded."""
        return Written(self.num_tokens, self.num_dropped)

    def num_touched(self, sequence: CachedSequence, block_size: int, num_lookahead: int) -> int:
        """Blocks that unwritten tokens and lookahead slots touch.

        The partial last block counts even if nothing is written to it; a full one does not.
        """
        num_slots = len(sequence.token_ids) - self.num_tokens + num_lookahead
        room = block_size - self.num_tokens % block_size
        return 1 - (room - num_slots) // block_size

    def num_taken(
        self, sequence: CachedSequence, table: list[int], refs: Sequence[int], block_size: int, num_lookahead: int
    ) -> int:
        """Blocks that the next append takes from the pool: new ones, and copies of shared blocks that it writes to."""
        num_tokens = len(sequence.token_ids)
        new = max(0, -(-(num_tokens + num_lookahead) // block_size) - len(table))
        end = min(len(table), -(-num_tokens // block_size))
        return new + sum(refs[block] > 1 for block in table[self.num_tokens // block_size : end])
