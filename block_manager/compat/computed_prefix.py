"""Leading computed blocks of a sequence, cached as in vLLM 0.6.3."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field


@dataclass(slots=True)
class ComputedPrefix:
    """Extended at each call until it meets a block that is not computed; from then on it is fixed."""

    blocks: list[int] = field(default_factory=list)
    has_gap: bool = False

    def grow(self, table: Sequence[int], is_computed: Callable[[int], bool]) -> list[int]:
        """The computed leading blocks, never the last of the table: its last token must be recomputed."""
        end = len(table) - 1
        while not self.has_gap and len(self.blocks) < end:
            block = table[len(self.blocks)]
            self.has_gap = not is_computed(block)
            if not self.has_gap:
                self.blocks.append(block)
        return self.blocks

    def cut(self, num_blocks: int) -> None:
        """Remove the blocks from that index on: they were not computed."""
        del self.blocks[num_blocks:]
        self.has_gap = True


def common_length(rows: Sequence[Sequence[int]]) -> int:
    """Number of leading entries that all rows have in common; 0 if there are no rows."""
    length = 0
    for entries in zip(*rows, strict=False):
        if any(entry != entries[0] for entry in entries):
            break
        length += 1
    return length
