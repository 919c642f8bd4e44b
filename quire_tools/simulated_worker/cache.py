"""The simulated KV cache: one hash per token slot, standing for the keys and values of that token in its context."""

from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from protos.worker.v1 import worker_pb2
from svc_common.errors import FailedPrecondition
from worker_svc.block_images import BlockImages, pairs_of
from worker_svc.rows.table import PackedTokens, RowTable, StepBatch

U64Array = NDArray[np.uint64]

_BASE = 0x9E3779B97F4A7C15
_FIRST_POWERS = 1_024


def mix(words: U64Array) -> U64Array:
    """splitmix64's output function, elementwise: a bijection in which every output bit depends on every input bit."""
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return words ^ (words >> np.uint64(31))


class SimulatedCache:
    """Slot p of a sequence holds h(p) = sum over i <= p of (token(i) + 1) * base**i + mix(adapter), modulo 2**64.

    The content of a slot is thus a function of the adapter and of all tokens up to it, as with real keys and
    values, and can be continued from the slot before. Zero = never written.
    """

    def __init__(self, num_gpu_blocks: int, num_cpu_blocks: int, block_size: int) -> None:
        self._block_size = block_size
        self._device = np.zeros((num_gpu_blocks, block_size), np.uint64)
        self._host = np.zeros((num_cpu_blocks, block_size), np.uint64)
        self.images = BlockImages(self.block_bytes, num_gpu_blocks)
        self._powers = _powers(_FIRST_POWERS)
        # Per row: incarnation, computed tokens and their hash after its last step. Used only to check
        # contents, never to draw.
        self._incarnations = np.zeros(0, np.int32)
        self._ends = np.zeros(0, np.int32)
        self._contents = np.zeros(0, np.uint64)
        self._remember_room(1)

    def clear(self) -> None:
        """Clear all contents."""
        self._incarnations[:] = -1
        self._device[:] = 0
        self._host[:] = 0
        self.images.clear()

    @property
    def block_bytes(self) -> int:
        """Bytes of a block."""
        return self._block_size * self._device.itemsize

    def read(self, blocks: Sequence[int]) -> memoryview:
        """The contents of device blocks."""
        return self._device[list(blocks)].view(np.uint8).reshape(-1).data

    def place(self, placed: Iterable[worker_pb2.PlacedImage]) -> None:
        """Copy images to the device blocks of a step, which `images.check` has accepted."""
        for each in placed:
            contents = np.frombuffer(self.images.take(each.image), np.uint64).reshape(-1, self._block_size)
            pairs = pairs_of(each)
            self._device[pairs[:, 1]] = contents[pairs[:, 0]]

    def move(self, swap_in: NDArray[np.int32], swap_out: NDArray[np.int32], copies: NDArray[np.int32]) -> None:
        """Swap in, swap out, then copy; pairs [m, 2] of (source, destination)."""
        for pairs, source, target in (
            (swap_in, self._host, self._device),
            (swap_out, self._device, self._host),
            (copies, self._device, self._device),
        ):
            for block, destination in pairs.tolist():
                target[destination] = source[block]

    def compute(self, rows: RowTable, batch: StepBatch, packed: PackedTokens) -> U64Array:
        """Write the batch's tokens and return the slot content of each packed token.

        Raises FailedPrecondition if the slot before a row's first token does not hold that row's context, or
        if different contents are written to one slot. Equal ones are allowed: policy vllm-v0 computes shared
        blocks of equal prompts that start together once per prompt.
        """
        if not len(batch.rows):
            return np.zeros(0, np.uint64)
        before = self._expected(rows, batch)
        terms = (packed.token_ids.astype(np.uint64) + np.uint64(1)) * self._power(packed.positions)
        if packed.adapter_ids is not None:
            terms += mix(packed.adapter_ids.astype(np.uint64))
        running = np.cumsum(terms, dtype=np.uint64)
        # Sums up to each row's first token, so that each row counts from its own context.
        first = packed.row_offsets[:-1]
        base = running[first] - terms[first]
        content = running + np.repeat(before - base, batch.counts)
        self._check_written_once(rows, packed, content)
        self._device.reshape(-1)[packed.slots] = content
        self._check_context(rows, batch, before)
        self._remember(rows, batch, content[packed.row_offsets[1:] - 1])
        return content

    def content_of(self, token_ids: NDArray[np.int32]) -> np.uint64:
        """Content of the slot of the last of these tokens."""
        terms = (token_ids.astype(np.uint64) + np.uint64(1)) * self._power(np.arange(len(token_ids), dtype=np.int32))
        return np.uint64(terms.sum(dtype=np.uint64))

    def continued(self, contents: U64Array, token_ids: NDArray[np.int32], positions: NDArray[np.int32]) -> U64Array:
        """Contents extended by one token each; `positions` are the tokens' positions."""
        return contents + (token_ids.astype(np.uint64) + np.uint64(1)) * self._power(positions)

    def _check_context(self, rows: RowTable, batch: StepBatch, expected: U64Array) -> None:
        """Check that the slot before each row's first token, in each cache group, holds that row's context.

        It may come from an earlier step or from another row of this step: all rows write before any row
        reads, as in a real model's layers. Prefix hits within a step rely on it.
        """
        last = batch.starts - 1
        blocks = rows.block_tables[:, batch.rows, np.maximum(last, 0) // self._block_size]
        held = self._device[blocks, last % self._block_size]
        lost = np.argwhere((held != expected) & (batch.starts > 0))
        if len(lost):
            group, i = lost[0].tolist()
            raise _kv_lost(rows, int(batch.rows[i]), int(batch.starts[i]), int(blocks[group, i]))

    def _expected(self, rows: RowTable, batch: StepBatch) -> U64Array:
        """The hash of each row's computed tokens: as remembered, or recomputed for a row added with computed tokens."""
        self._remember_room(len(rows.occupied))
        at = batch.rows
        new = (self._incarnations[at] != rows.incarnations[at]) | (self._ends[at] != batch.starts)
        expected = np.where(batch.starts > 0, self._contents[at], np.uint64(0))
        for i in np.flatnonzero(new & (batch.starts > 0)).tolist():
            expected[i] = self.content_of(rows.token_ids[at[i], : batch.starts[i]])
        adapters = mix(rows.options.adapter_ids[at].astype(np.uint64))
        return expected + np.where(new, adapters * batch.starts.astype(np.uint64), np.uint64(0))

    def _remember(self, rows: RowTable, batch: StepBatch, content: U64Array) -> None:
        self._incarnations[batch.rows] = rows.incarnations[batch.rows]
        self._ends[batch.rows] = batch.starts + batch.counts
        self._contents[batch.rows] = content

    def _remember_room(self, num_rows: int) -> None:
        if num_rows > len(self._incarnations):
            self._incarnations = np.full(num_rows, -1, np.int32)
            self._ends = np.zeros(num_rows, np.int32)
            self._contents = np.zeros(num_rows, np.uint64)

    def _power(self, positions: NDArray[np.int32]) -> U64Array:
        if len(positions) and int(positions.max()) >= len(self._powers):
            self._powers = _powers(2 * (int(positions.max()) + 1))
        return self._powers[positions]

    def _check_written_once(self, rows: RowTable, packed: PackedTokens, content: U64Array) -> None:
        written, content = packed.slots.ravel(), np.tile(content, len(packed.slots))
        order = np.argsort(written, kind="stable")
        slots, contents = written[order], content[order]
        torn = np.flatnonzero((slots[1:] == slots[:-1]) & (contents[1:] != contents[:-1]))
        if len(torn):
            raise self._written_twice(rows, packed, int(slots[torn[0]]))

    def _written_twice(self, rows: RowTable, packed: PackedTokens, slot: int) -> FailedPrecondition:
        names = [rows.names[row] for row in packed.token_rows[(packed.slots == slot).any(0)].tolist()]
        block = slot // self._block_size
        return FailedPrecondition(
            f"block {block} is written by {' and '.join(names)} in one step", reason="BLOCK_WRITTEN_TWICE"
        )


def _powers(count: int) -> U64Array:
    powers = np.full(count, _BASE, np.uint64)
    powers[0] = 1
    return np.cumprod(powers, dtype=np.uint64)


def _kv_lost(rows: RowTable, row: int, start: int, block: int) -> FailedPrecondition:
    return FailedPrecondition(
        f"{rows.names[row]} (row {row}) has {start} computed tokens, but block {block} does not hold the last of them: "
        "it was given away, written by another or never computed",
        reason="KV_LOST",
    )
