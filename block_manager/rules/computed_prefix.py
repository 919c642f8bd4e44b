"""Leading blocks of a sequence that are computed, as 0.6.3 remembers them (R115, R121)."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field


@dataclass(slots=True)
class ComputedPrefix:
    """Grows each time it is asked for, until it meets a block that is not computed; from then on it stays as it is."""

    blocks: list[int] = field(default_factory=list)
    has_gap: bool = False

    def grow(self, table: Sequence[int], is_computed: Callable[[int], bool]) -> list[int]:
        """The blocks, never the last of the table: its last token must be computed anew."""
        end = len(table) - 1
        while not self.has_gap and len(self.blocks) < end:
            block = table[len(self.blocks)]
            self.has_gap = not is_computed(block)
            if not self.has_gap:
                self.blocks.append(block)
        return self.blocks

    def cut(self, num_blocks: int) -> None:
        """Blocks from there on never came to be computed."""
        del self.blocks[num_blocks:]
        self.has_gap = True


def common_length(rows: Sequence[Sequence[int]]) -> int:
    """How many leading entries all rows have in common; none of no rows."""
    length = 0
    for entries in zip(*rows, strict=False):
        if any(entry != entries[0] for entry in entries):
            break
        length += 1
    return length
