"""Contents of a simulated worker's KV blocks: for each slot a key of all tokens up to it.

Equal keys mean equal contents, so a block freed too early, a wrong prefix or a swap to the wrong place is
detected when read.
"""

import math
from typing import Protocol

from quire_tools.simulation.token_model import mix

Blocks = dict[int, list[int]]
Pairs = list[tuple[int, int]]


def next_key(before: int, token: int) -> int:
    """The key of a slot, from the key before it and its token."""
    return mix(before, token)


class Memory(Protocol):
    """A worker's view of its blocks."""

    def move(self, swap_in: Pairs, swap_out: Pairs, copy: Pairs) -> None:
        """Swap in, swap out, copy, in this order; the pairs of each kind at once."""

    def room(self, table: list[int]) -> float:
        """Number of tokens that a sequence with that table can have."""

    def write(self, table: list[int], position: int, key: int) -> None:
        """Write the key at a position."""

    def forget(self, table: list[int], start: int, end: int) -> None:
        """Invalidate what was written from `start` to `end`."""

    def first_wrong(self, table: list[int], keys: list[int], start: int, end: int) -> int | None:
        """The first position from `start` to `end` with a slot that does not contain its key; None if all do."""


class BlockMemory:
    """Contents of device and host blocks of `block_size` slots. A slot never written holds 0."""

    def __init__(self, block_size: int) -> None:
        self._size = block_size
        self._device: Blocks = {}
        self._host: Blocks = {}

    def move(self, swap_in: Pairs, swap_out: Pairs, copy: Pairs) -> None:
        """See `Memory`."""
        self._move(self._host, self._device, swap_in)
        self._move(self._device, self._host, swap_out)
        self._move(self._device, self._device, copy)

    def room(self, table: list[int]) -> float:
        """See `Memory`."""
        return len(table) * self._size

    def write(self, table: list[int], position: int, key: int) -> None:
        """See `Memory`."""
        block = self._device.get(table[position // self._size])
        if block is None:
            block = self._device[table[position // self._size]] = [0] * self._size
        block[position % self._size] = key

    def forget(self, table: list[int], start: int, end: int) -> None:
        """See `Memory`."""
        for position in range(start, min(end, len(table) * self._size)):
            self.write(table, position, 0)

    def first_wrong(self, table: list[int], keys: list[int], start: int, end: int) -> int | None:
        """See `Memory`."""
        size = self._size
        for at in range(start // size, -(-end // size)):
            low, high = max(start, at * size), min(end, (at + 1) * size)
            held = self._device.get(table[at]) if at < len(table) else None
            wanted = keys[low:high]
            if held is None or held[low - at * size : high - at * size] != wanted:
                return low
        return None

    @staticmethod
    def _move(source: Blocks, target: Blocks, pairs: Pairs) -> None:
        contents = [(destination, list(source.get(block, ()))) for block, destination in pairs]
        for destination, content in contents:
            if content:
                target[destination] = content
            else:
                target.pop(destination, None)


class UncountedMemory:
    """Memory for schedulers that do not account for blocks: never full and never wrong."""

    def move(self, swap_in: Pairs, swap_out: Pairs, copy: Pairs) -> None:
        """No-op."""

    def room(self, table: list[int]) -> float:
        """No limit."""
        return math.inf

    def write(self, table: list[int], position: int, key: int) -> None:
        """No-op."""

    def forget(self, table: list[int], start: int, end: int) -> None:
        """No-op."""

    def first_wrong(self, table: list[int], keys: list[int], start: int, end: int) -> int | None:
        """Always None."""
        return None
