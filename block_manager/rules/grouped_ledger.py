"""The ledger of a model with several cache groups: their tables as one, whose positions have a block id for each group."""

from collections import ChainMap
from collections.abc import Iterable, Sequence

from block_manager.ledger import Ledger
from block_manager.rules.windows import most_held


def flat(of_groups: Iterable[Sequence[int]]) -> list[int]:
    """Equally long lists of blocks as one: the first block of each group, then the second of each."""
    return [block for blocks in zip(*of_groups, strict=True) for block in blocks]


class FlatTables(ChainMap[str, list[int]]):
    """The tables of all groups as flat ones, which are made when they are read and must not be changed."""

    def __getitem__(self, name: str) -> list[int]:
        return flat(tables[name] for tables in self.maps)


class GroupedLedger(Ledger):
    """The ledgers of all groups as one: common pools, flat tables.

    `windows`: of each group the sliding window in tokens, None = the whole sequence. `num_ahead_tokens`: the most tokens
    of a sequence behind the token by whose window blocks were freed last.
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
