"""The account of all blocks: a device pool, a host pool, and the block table of every live sequence."""

from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from block_manager.pool import BlockPool, PoolCounts

HOLE = -1
"""In the place of a block that no token to come attends to."""


@dataclass(frozen=True, slots=True)
class PoolReport:
    """Pool counts, and the reference count of each block in use by name ("g3", "c0"); shown by `quire blocks`.

    `num_state_blocks`: as in `Ledger`.
    """

    block_size: int
    gpu: PoolCounts
    cpu: PoolCounts
    refs: dict[str, int]
    num_state_blocks: int = 0


class Ledger:
    """Owner of the pools and tables. Only cache rules modify it; tables hold device block ids in logical order.

    `num_groups`: block ids for each position of a table (`GroupedLedger`). `windows`: of the cache groups that have
    one, in tokens; a model with one group has none here. `num_state_blocks`: the first blocks of each table, which hold
    states and no positions. `reading`: lists of referenced blocks that are in no table, by sequence (`StateTables`).
    """

    num_groups = 1
    windows: tuple[int, ...] = ()
    num_state_blocks = 0
    reading: Mapping[str, list[int]] = MappingProxyType({})

    def __init__(self, block_size: int, gpu: BlockPool, cpu: BlockPool) -> None:
        self.block_size = block_size
        self.gpu = gpu
        self.cpu = cpu
        self.tables: MutableMapping[str, list[int]] = {}
        self.host_tables: MutableMapping[str, list[int]] = {}

    def resize(self, num_gpu_blocks: int, num_cpu_blocks: int) -> None:
        """Change the pool sizes. ValueError, and no change, if blocks in use would be removed."""
        for pool, count in ((self.gpu, num_gpu_blocks), (self.cpu, num_cpu_blocks)):
            if pool.num_blocks - count > pool.num_free:
                raise ValueError(f"cannot remove {pool.num_blocks - count} blocks: {pool.num_free} are free")
        self.gpu.resize(num_gpu_blocks)
        self.cpu.resize(num_cpu_blocks)

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks needed for `num_tokens` tokens."""
        return -(-num_tokens // self.block_size)

    def most_blocks(self, num_tokens: int, num_sequences: int = 1) -> int:
        """Blocks that suffice for so many sequences of one request, each of at most `num_tokens` tokens."""
        return self.blocks_for(num_tokens) * num_sequences

    def room(self, name: str) -> int:
        """Tokens that the sequence's device table has slots for; 0 without one."""
        return len(self._positions(name)) // self.num_groups * self.block_size

    def blocks_behind(self, name: str, num_tokens: int) -> list[int]:
        """Blocks of the sequence's device table that hold tokens behind the first `num_tokens`."""
        return self._positions(name)[num_tokens // self.block_size * self.num_groups :]

    def num_shared_tokens(self, name: str) -> int:
        """Tokens in the leading blocks of a device table that other tables contain too."""
        refs, table, step = self.gpu.refs, self._positions(name), self.num_groups
        for at in range(0, len(table), step):
            counts = [refs[block] for block in table[at : at + step]]
            if 1 in counts or not any(counts):
                return at // step * self.block_size
        return len(table) // step * self.block_size

    def blocks_of_copy(self, name: str, num_tokens: int) -> tuple[list[int], int]:
        """Device blocks that a copy of a sequence with so many computed tokens is made of, and how many of the first ones
        do not change any more.

        In the order of its table, but for those of states, which are the last. HOLE stands for blocks behind a window.
        """
        step, reserved = self.num_groups, self.gpu.reserved
        table = self._positions(name)[: -(-num_tokens // self.block_size) * step]
        blocks = [HOLE if block in reserved else block for block in table]
        return blocks + self.tables[name][: self.num_state_blocks], num_tokens // self.block_size * step

    def _positions(self, name: str) -> list[int]:
        """The sequence's device table without states."""
        table = self.tables.get(name, [])
        return table[self.num_state_blocks :] if self.num_state_blocks else table

    def parts(self) -> Sequence["Ledger"]:
        """Ledgers that each must balance: itself, or one per device."""
        return [self]

    def named_tables(self) -> dict[str, list[str]]:
        """All tables with block names: "g3" is device block 3, "c0" host block 0."""
        named = {name: [f"g{b}" for b in blocks] for name, blocks in self.tables.items()}
        named.update({name: [f"c{b}" for b in blocks] for name, blocks in self.host_tables.items()})
        return named

    def cached_blocks(self) -> list[str]:
        """Names of the device's free blocks that hold a cached prefix, in order of reuse."""
        return [f"g{block}" for block in self.gpu.cached()]

    def counts(self) -> tuple[PoolCounts, PoolCounts]:
        """Counts of the device pool and of the host pool."""
        return self.gpu.counts(), self.cpu.counts()

    def report(self) -> PoolReport:
        """Current counts and references."""
        refs = {f"g{b}": n for b, n in enumerate(self.gpu.refs) if n}
        refs.update({f"c{b}": n for b, n in enumerate(self.cpu.refs) if n})
        return PoolReport(self.block_size, self.gpu.counts(), self.cpu.counts(), refs, self.num_state_blocks)
