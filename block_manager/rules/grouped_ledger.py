"""The ledgers of several cache groups, and of states, as one."""

from collections import ChainMap
from collections.abc import Mapping, MutableMapping, Sequence

from block_manager.ledger import Ledger
from block_manager.rules.cache_groups import flat, most_held
from block_manager.rules.state_tables import StateTables


class FlatTables(ChainMap[str, list[int]]):
    """The tables of all groups as flat ones behind those of states, which are made when they are read and must not be
    changed.
    """

    def __init__(self, states: Mapping[str, list[int]], *groups: MutableMapping[str, list[int]]) -> None:
        super().__init__(*groups)
        self._states = states

    def __getitem__(self, name: str) -> list[int]:
        return [*self._states[name], *flat(tables[name] for tables in self.maps)]


class GroupedLedger(Ledger):
    """The ledgers of all groups and of the states as one: common pools, flat tables.

    `windows`: of each group the sliding window in tokens, None = the whole sequence. `num_ahead_tokens`: as in
    `most_held`.
    """

    def __init__(
        self, groups: Sequence[Ledger], windows: Sequence[int | None], num_ahead_tokens: int, states: StateTables
    ) -> None:
        super().__init__(groups[0].block_size, groups[0].gpu, groups[0].cpu)
        self.tables = FlatTables(states.ledger.tables, *[ledger.tables for ledger in groups])
        self.host_tables = FlatTables(states.ledger.host_tables, *[ledger.host_tables for ledger in groups])
        self.num_groups, self.num_state_blocks, self.reading = len(groups), states.num_blocks, states.reading
        self.windows = tuple(window for window in windows if window is not None)
        self.most_held = [self._most_held(window, num_ahead_tokens) for window in windows]

    def _most_held(self, window: int | None, num_ahead_tokens: int) -> int | None:
        return None if window is None else most_held(window, num_ahead_tokens, self.block_size)

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that suffice for a sequence of `num_tokens` tokens, computed in steps of any size."""
        num_blocks = super().blocks_for(num_tokens)
        of_groups = sum(num_blocks if most is None else min(num_blocks, most) for most in self.most_held)
        return of_groups + (self.num_state_blocks if num_tokens else 0)

    def most_blocks(self, num_tokens: int, num_sequences: int = 1) -> int:
        """Blocks that suffice for so many sequences of one request, and for the checkpoint with which it starts.

        Several start with all blocks of their prompt, which they share, so windows do not count then.
        """
        if num_sequences == 1:
            return self.blocks_for(num_tokens) + self.num_state_blocks
        of_groups = super().blocks_for(num_tokens) * self.num_groups
        return (of_groups + self.num_state_blocks) * num_sequences + self.num_state_blocks
