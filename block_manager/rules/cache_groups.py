"""Cache groups: which blocks the tokens of a sliding window need, and the ledger of several groups as one.

A token attends to itself and the `window` - 1 tokens before it. Blocks behind the windows of all tokens to come are
freed; the null block stands for them in the block table.
"""

from collections import ChainMap
from collections.abc import Iterable, Sequence

from block_manager.ledger import Ledger

NULL = 0
"""The null block, never allocated; it stands in tables for blocks behind a sliding window."""


def num_leading(block: int, table: list[int]) -> int:
    """Number of leading entries of a table that are that block."""
    return next((i for i, found in enumerate(table) if found != block), len(table))


def num_behind(num_tokens: int, window: int, block_size: int) -> int:
    """Leading blocks that no token behind the first `num_tokens` attends to."""
    return max(0, num_tokens - window + 1) // block_size


def most_held(window: int, num_ahead_tokens: int, block_size: int) -> int:
    """The most blocks that a sequence holds of a window: those from the window of some token on, the last one that blocks
    were freed for, up to the end of the table at most `num_ahead_tokens` behind that.
    """
    return -(-(window + num_ahead_tokens - 2) // block_size) + 1


def longest_hit(blocks: Sequence[int | None], window: int, block_size: int) -> int:
    """The most leading blocks that can be shared, if for each the cached block is given, or None.

    Behind n blocks the next token attends to the last ones of them only; n are shared where those are cached.
    """
    num_needed, run = -(-(window - 1) // block_size), 0
    for at in range(len(blocks), 0, -1):
        if run == num_needed:
            return at + run
        run = 0 if blocks[at - 1] is None else run + 1
    return run


def flat(of_groups: Iterable[Sequence[int]]) -> list[int]:
    """Equally long lists of blocks as one: the first block of each group, then the second of each."""
    return [block for blocks in zip(*of_groups, strict=True) for block in blocks]


class FlatTables(ChainMap[str, list[int]]):
    """The tables of all groups as flat ones, which are made when they are read and must not be changed."""

    def __getitem__(self, name: str) -> list[int]:
        return flat(tables[name] for tables in self.maps)


class GroupedLedger(Ledger):
    """The ledgers of all groups as one: common pools, flat tables.

    `windows`: of each group the sliding window in tokens, None = the whole sequence. `num_ahead_tokens`: as in
    `most_held`.
    """

    def __init__(self, groups: Sequence[Ledger], windows: Sequence[int | None], num_ahead_tokens: int) -> None:
        super().__init__(groups[0].block_size, groups[0].gpu, groups[0].cpu)
        self.tables = FlatTables(*[ledger.tables for ledger in groups])
        self.host_tables = FlatTables(*[ledger.host_tables for ledger in groups])
        self.num_groups = len(groups)
        self.windows = tuple(window for window in windows if window is not None)
        self.most_held = [self._most_held(window, num_ahead_tokens) for window in windows]

    def _most_held(self, window: int | None, num_ahead_tokens: int) -> int | None:
        return None if window is None else most_held(window, num_ahead_tokens, self.block_size)

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that suffice for a sequence of `num_tokens` tokens, computed in steps of any size."""
        num_blocks = super().blocks_for(num_tokens)
        return sum(num_blocks if most is None else min(num_blocks, most) for most in self.most_held)

    def most_blocks(self, num_tokens: int, num_sequences: int = 1) -> int:
        """Blocks that suffice for so many sequences of one request.

        Several start with all blocks of their prompt, which they share, so windows do not count then.
        """
        if num_sequences == 1:
            return self.blocks_for(num_tokens)
        return super().blocks_for(num_tokens) * self.num_groups * num_sequences
