"""How well the memory of the KV cache is used: what sharing saves, what last blocks waste, and the same without paging (R14, R209).

Pure arithmetic over block tables; when they are read is the caller's business. Right after `schedule()` it is exact.
"""

from collections.abc import Collection, Hashable, Iterable, Sequence
from dataclasses import dataclass

from block_manager.contiguous import ContiguousMemory


@dataclass(frozen=True, slots=True)
class HeldSequence:
    """A sequence's block table, and its tokens that have or will get KV: known ones and those promised by steps under way.

    A token that its table has no slot for (sampled since the last `schedule()`) is not held and does not count.
    """

    blocks: Sequence[Hashable]
    num_tokens: int


@dataclass(frozen=True, slots=True)
class PagedMemory:
    """Blocks at one instant, or sums over several instants.

    `num_tokens` are held. `logical_blocks`: entries of all tables. `physical_blocks`: different blocks among them.
    `waste_tokens`: slots of last blocks that hold no token, each physical block counted once. `max_waste_tokens`: the same of
    the worst sequence, less than a block (R14, R16); lookahead slots, where a policy has them, add to it.
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
        """Share of blocks that sharing saves: 1 - physical / logical; 0 without blocks."""
        return 1.0 - self.physical_blocks / self.logical_blocks if self.logical_blocks else 0.0

    @property
    def waste(self) -> float:
        """Share of the slots of all physical blocks that is wasted in last blocks; 0 without blocks."""
        return self.waste_tokens / (self.physical_blocks * self.block_size) if self.physical_blocks else 0.0

    def __add__(self, other: "PagedMemory") -> "PagedMemory":
        """Sums over two instants; the worst waste of both."""
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
    """Paged memory as it is, beside what contiguous allocation by maximum length would hold for the same requests."""

    paged: PagedMemory
    contiguous: ContiguousMemory


def paged_memory(
    sequences: Iterable[HeldSequence], block_size: int, *, nobodys_blocks: Collection[Hashable] = ()
) -> PagedMemory:
    """Counts the tables. `nobodys_blocks`: placeholders such as the null block of a sliding window (R105), which cost nothing.

    A table that names a block twice holds it once.
    """
    distinct: set[Hashable] = set()
    last_blocks: dict[Hashable, int] = {}
    num_sequences = num_tokens = num_logical = worst = 0
    nobodys = frozenset(nobodys_blocks)
    for sequence in sequences:
        if not sequence.blocks:
            continue
        own = set(sequence.blocks) - nobodys
        room = len(sequence.blocks) * block_size
        waste = max(0, room - sequence.num_tokens)
        last = sequence.blocks[-1]
        last_blocks[last] = min(waste, last_blocks.get(last, waste))
        distinct |= own
        num_logical += len(own)
        num_tokens += min(sequence.num_tokens, room)
        num_sequences += 1
        worst = max(worst, waste)
    return PagedMemory(
        block_size, num_sequences, num_tokens, num_logical, len(distinct), sum(last_blocks.values()), worst
    )
