"""Utilization of KV-cache memory: blocks saved by sharing, waste in last blocks, and the same without paging.

Pure arithmetic over block tables, which the caller reads; exact if read right after `schedule()`.
"""

from collections.abc import Collection, Hashable, Iterable, Sequence
from dataclasses import dataclass

from block_manager.contiguous import ContiguousMemory


@dataclass(frozen=True, slots=True)
class HeldSequence:
    """A sequence's block table, and the number of its tokens that have KV or will have it by a step in flight.

    A token without a slot in the table (sampled since the last `schedule()`) does not count.
    """

    blocks: Sequence[Hashable]
    num_tokens: int


@dataclass(frozen=True, slots=True)
class PagedMemory:
    """Blocks at one instant, or sums over several instants.

    `num_tokens`: tokens held. `logical_blocks`: entries of all tables. `physical_blocks`: distinct blocks among
    them. `waste_tokens`: empty slots in last blocks, each physical block counted once. `max_waste_tokens`: the
    most of one sequence; less than a block, plus lookahead slots under policies that have them.
    """

    block_size: int
    num_sequences: int = 0
    num_tokens: int = 0
    logical_blocks: int = 0
    physical_blocks: int = 0
    waste_tokens: int = 0
    max_waste_tokens: int = 0

    @property
    def saved(self) -> float:
        """Fraction of blocks saved by sharing: 1 - physical / logical; 0 without blocks."""
        return 1.0 - self.physical_blocks / self.logical_blocks if self.logical_blocks else 0.0

    @property
    def waste(self) -> float:
        """Fraction of the slots of all physical blocks that is wasted in last blocks; 0 without blocks."""
        return self.waste_tokens / (self.physical_blocks * self.block_size) if self.physical_blocks else 0.0

    def __add__(self, other: "PagedMemory") -> "PagedMemory":
        """Sum over two instants; `max_waste_tokens` is the maximum of both."""
        return PagedMemory(
            self.block_size,
            self.num_sequences + other.num_sequences,
            self.num_tokens + other.num_tokens,
            self.logical_blocks + other.logical_blocks,
            self.physical_blocks + other.physical_blocks,
            self.waste_tokens + other.waste_tokens,
            max(self.max_waste_tokens, other.max_waste_tokens),
        )


@dataclass(frozen=True, slots=True)
class MemoryReport:
    """Paged memory as it is, and what contiguous allocation by maximum length would hold of the same requests."""

    paged: PagedMemory
    contiguous: ContiguousMemory


def paged_memory(
    sequences: Iterable[HeldSequence],
    block_size: int,
    *,
    placeholders: Collection[Hashable] = (),
    num_groups: int = 1,
    num_state_blocks: int = 0,
) -> PagedMemory:
    """Count the tables. `placeholders`: placeholders without cost, such as the null block of a sliding window.
    `num_groups`: blocks at each position of a table; each has slots for the same tokens. `num_state_blocks`: the first
    blocks of each table, which have no slots.

    A block that occurs twice in a table counts once.
    """
    distinct: set[Hashable] = set()
    last_blocks: dict[Hashable, int] = {}
    num_sequences = num_tokens = num_logical = worst = 0
    free_of_cost = frozenset(placeholders)
    for sequence in sequences:
        if not sequence.blocks:
            continue
        own = set(sequence.blocks) - free_of_cost
        room = (len(sequence.blocks) - num_state_blocks) // num_groups * block_size
        waste = max(0, room - sequence.num_tokens)
        for last in sequence.blocks[-num_groups:]:
            last_blocks[last] = min(waste, last_blocks.get(last, waste))
        distinct |= own
        num_logical += len(own)
        num_tokens += min(sequence.num_tokens, room)
        num_sequences += 1
        worst = max(worst, waste)
    return PagedMemory(
        block_size, num_sequences, num_tokens, num_logical, len(distinct), sum(last_blocks.values()), worst
    )
