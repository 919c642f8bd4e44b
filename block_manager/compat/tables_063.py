"""Block tables as vLLM 0.6.3 writes them: full blocks found by contents, shared ones copied before a write."""

from block_manager.cache_rules import CachedSequence, Growth, Pair
from block_manager.compat.allocator_063 import FullBlockAllocator
from block_manager.compat.prefix_keys import FullBlockKeys
from block_manager.compat.sliding_window import SlidingWindow
from block_manager.compat.table_extent import Written
from block_manager.hashing import HashChain, HashRename
from block_manager.ledger import Ledger


class Tables063:
    """Writer of the device tables and of how far each is written. Owner of the keys of full blocks."""

    def __init__(
        self,
        ledger: Ledger,
        blocks: FullBlockAllocator,
        written: dict[str, Written],
        window: SlidingWindow | None,
        *,
        prefix_caching: bool,
        rename: HashRename | None,
        chains: dict[str, HashChain] | None,
    ) -> None:
        self._ledger = ledger
        self._blocks = blocks
        self._written = written
        self._window = window
        self.keys = FullBlockKeys(ledger.block_size, enabled=prefix_caching, rename=rename, chains=chains)

    def fill(self, sequence: CachedSequence, shared: list[int]) -> list[int]:
        """Create the table of a sequence; its first blocks are `shared`."""
        size, num_tokens = self._ledger.block_size, len(sequence.token_ids)
        table = self._ledger.tables[sequence.name] = list(shared)
        for i in range(len(shared), num_tokens // size):
            key = self.keys.of(sequence, i)
            table.append(self._blocks.allocate_full(key, (i + 1) * size, reuse=not sequence.no_cache_reuse))
        if num_tokens % size:
            table.append(self._blocks.allocate())
        self._written[sequence.name] = Written(num_tokens)
        return table

    def extend(self, sequence: CachedSequence, num_lookahead: int) -> Growth:
        """Write the unwritten tokens into the table, with `num_lookahead` slots behind them."""
        table, written = self._ledger.tables[sequence.name], self._written[sequence.name]
        before = list(table)
        if self._window:
            written.num_dropped = self._window.drop(table, written.num_dropped, sequence.num_computed_tokens)
        goal = self._ledger.blocks_for(len(sequence.token_ids) + num_lookahead)
        table += [self._blocks.allocate() for _ in range(goal - len(table))]
        first = written.num_tokens // self._ledger.block_size
        last = self._ledger.blocks_for(len(sequence.token_ids))
        copies = [pair for i in range(first, last) for pair in self._write(sequence, table, i)]
        written.num_tokens = len(sequence.token_ids)
        return Growth(table[len(before) :], copies, rewritten=table[: len(before)] != before)

    def fork(self, parent: CachedSequence, child: CachedSequence) -> None:
        """Let the child share all blocks of its parent; no-op if the parent has no table."""
        if parent.name in self._ledger.tables:
            table = self._ledger.tables[child.name] = list(self._ledger.tables[parent.name])
            written = self._written[child.name] = self._written[parent.name].fork()
            self._ledger.gpu.share(table[written.num_dropped :])

    def forget(self, name: str) -> None:
        """Drop a sequence's block keys."""
        self.keys.forget(name)

    def _write(self, sequence: CachedSequence, table: list[int], i: int) -> list[Pair]:
        """Write tokens into block `i`: copy it first if shared; use a cached block instead if it becomes full and
        equal.
        """
        source, end = table[i], (i + 1) * self._ledger.block_size
        copied = self._ledger.gpu.refs[source] > 1
        target = self._blocks.copy_on_write(source) if copied else source
        table[i] = target
        if end <= len(sequence.token_ids):
            key = self.keys.of(sequence, i)
            table[i] = self._blocks.fill(target, key, end, reuse=not sequence.no_cache_reuse)
        return [(source, target)] if copied else []
