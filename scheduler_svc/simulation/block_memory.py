"""What lies in the KV blocks of a simulated worker: for each slot a key of the tokens up to it.

Equal keys = equal content, so a block given away too early, a wrong prefix or a swap to the wrong place is seen by who reads it.
"""

import math
from typing import Protocol

from scheduler_svc.simulation.token_model import mix

Blocks = dict[int, list[int]]
Pairs = list[tuple[int, int]]


def next_key(before: int, token: int) -> int:
    """The key of a slot, from the key before it and its token."""
    return mix(before, token)


class Memory(Protocol):
    """What a worker asks of its blocks."""

    def move(self, swap_in: Pairs, swap_out: Pairs, copy: Pairs) -> None:
        """Swaps in, swaps out, copies, in this order (R3); of each kind all pairs at once."""

    def room(self, table: list[int]) -> float:
        """Tokens that a sequence with that table can have."""

    def write(self, table: list[int], position: int, key: int) -> None:
        """Computes the slot of a position."""

    def forget(self, table: list[int], start: int, end: int) -> None:
        """What was computed there is worth nothing."""

    def first_wrong(self, table: list[int], keys: list[int], start: int, end: int) -> int | None:
        """The first position from `start` to `end` whose slot does not hold its key, None when all do."""


class BlockMemory:
    """Owner of the content of device and host blocks of `block_size` slots. A slot never written holds 0."""

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


class NoBlocks:
    """The memory of a worker whose scheduler keeps no account of blocks: there is room for all."""

    def move(self, swap_in: Pairs, swap_out: Pairs, copy: Pairs) -> None:
        """Nothing."""

    def room(self, table: list[int]) -> float:
        """No limit."""
        return math.inf

    def write(self, table: list[int], position: int, key: int) -> None:
        """Nothing."""

    def forget(self, table: list[int], start: int, end: int) -> None:
        """Nothing."""

    def first_wrong(self, table: list[int], keys: list[int], start: int, end: int) -> int | None:
        """Nothing is wrong."""
        return None
