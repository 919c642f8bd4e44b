"""Swaps: blocks between the device pool and the host pool.

On a device with streams, blocks go in pieces through two buffers of device memory: one kernel gathers a piece while
the piece before it is copied to the host, and one scatters a piece while the next is copied to the device.

compute stream | gather 0 | gather 1 |    wait     | gather 2 | copies of blocks, model: may reuse the blocks
                    \\ waits    \\ waits  / buffer 0 is free
side stream              | 0 to host  | 1 to host  | 2 to host

side stream    | 0 to device | 1 to device | wait | 2 to device
                       \\ waits       \\ waits  / buffer 0 is free      \\ waits
compute stream         | scatter 0  | scatter 1   |                   | scatter 2 | model: reads the blocks

All copies are on one side stream: a host block is read or written in the order of the swaps, whatever computes
meanwhile. vLLM's and SGLang's offloading order two streams by events in the same way.
"""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from paged_kernels.backend import BlockMover, Pairs, swap_blocks
from worker_svc.device.streams import SideStream, StreamEvent

NUM_BUFFERS = 2
_BUFFER_BYTES = 16 * 2**20
"""One block of a large model is 2 MiB; copies reach their highest rate from about 8 MiB."""


def piece_blocks(block_bytes: int, num_host_blocks: int) -> int:
    """Blocks that one buffer holds: no more than can be swapped, and at least one."""
    return max(1, min(_BUFFER_BYTES // max(1, block_bytes), -(-num_host_blocks // NUM_BUFFERS)))


def staging_bytes(block_bytes: int, swap_bytes: int) -> int:
    """Device memory of the buffers for so much swap space. They are allocated with the pools."""
    num_host_blocks = swap_bytes // block_bytes if block_bytes else 0
    return NUM_BUFFERS * piece_blocks(block_bytes, num_host_blocks) * block_bytes


class Swaps(Protocol):
    """Moves blocks between a device pool and a host pool, both [num_layers, 2, num_blocks, block_elements]."""

    def swap_in(self, pairs: Pairs) -> None:
        """Copy (host block, device block) pairs to the device, before all work that is launched later."""
        ...

    def swap_out(self, pairs: Pairs) -> None:
        """Copy (device block, host block) pairs to the host; work that is launched later may overwrite the device blocks."""
        ...

    def finish(self) -> None:
        """Block until the host pool has all blocks that were swapped out."""
        ...

    def read(self, blocks: Sequence[int]) -> torch.Tensor:
        """Copy device blocks to new host memory, [n, num_layers, 2, block_elements]. Waits for the device."""
        ...

    def place(self, contents: torch.Tensor, pairs: Pairs) -> None:
        """Copy (block of `contents`, device block) pairs; `contents`: as from `read`, in host memory of any kind."""
        ...


class HostSwaps:
    """Swaps between two pools in host memory. See Swaps."""

    def __init__(self, device_pool: torch.Tensor, host_pool: torch.Tensor) -> None:
        self._device_pool, self._host_pool = device_pool, host_pool

    def swap_in(self, pairs: Pairs) -> None:
        """See Swaps."""
        swap_blocks(self._host_pool, self._device_pool, pairs)

    def swap_out(self, pairs: Pairs) -> None:
        """See Swaps."""
        swap_blocks(self._device_pool, self._host_pool, pairs)

    def finish(self) -> None:
        """See Swaps. No-op."""

    def read(self, blocks: Sequence[int]) -> torch.Tensor:
        """See Swaps."""
        contents = _images(self._device_pool, len(blocks))
        swap_blocks(self._device_pool, contents.permute(1, 2, 0, 3), [(block, i) for i, block in enumerate(blocks)])
        return contents

    def place(self, contents: torch.Tensor, pairs: Pairs) -> None:
        """See Swaps."""
        swap_blocks(contents.permute(1, 2, 0, 3), self._device_pool, pairs)


@dataclass(slots=True)
class _Buffer:
    """`memory`: [most blocks, num_layers, 2, block_elements]. `free`: when its last piece has been read."""

    memory: torch.Tensor
    free: StreamEvent | None = None


class StagedSwaps:
    """Swaps through buffers, as drawn above. See Swaps. Owns the buffers.

    `host_pool` must be in memory that the device copies from and to directly. Block-major, neighbouring blocks go in one
    copy.
    """

    def __init__(
        self, device_pool: torch.Tensor, host_pool: torch.Tensor, blocks: BlockMover, side: SideStream
    ) -> None:
        self._device_pool, self._host_pool = device_pool, host_pool
        self._blocks, self._side = blocks, side
        num_layers, two, _, elements = device_pool.shape
        block_bytes = num_layers * two * elements * device_pool.element_size()
        count = piece_blocks(block_bytes, host_pool.shape[2])
        sizes = (count, num_layers, two, elements)
        self._buffers = [_Buffer(side.memory(sizes, device_pool.dtype)) for _ in range(NUM_BUFFERS)]

    def swap_in(self, pairs: Pairs) -> None:
        """See Swaps."""
        for piece, buffer in self._pieces(sorted(pairs)):
            host_ids, device_ids = zip(*piece, strict=True)
            staged, side = buffer.memory[: len(piece)], self._side
            if buffer.free is not None:
                side.copies_wait(buffer.free)
            for host, part in _runs(self._host_pool, host_ids, staged):
                side.copy(host, part)
            side.compute_waits(side.record_copies())
            self._blocks.scatter(staged, self._device_pool, side.upload(device_ids))
            buffer.free = side.record_compute()

    def swap_out(self, pairs: Pairs) -> None:
        """See Swaps."""
        for piece, buffer in self._pieces(sorted(pairs, key=lambda pair: pair[1])):
            device_ids, host_ids = zip(*piece, strict=True)
            staged, side = buffer.memory[: len(piece)], self._side
            if buffer.free is not None:
                side.compute_waits(buffer.free)
            self._blocks.gather(self._device_pool, side.upload(device_ids), staged)
            side.copies_wait(side.record_compute())
            for host, part in _runs(self._host_pool, host_ids, staged):
                side.copy(part, host)
            buffer.free = side.record_copies()

    def finish(self) -> None:
        """See Swaps."""
        self._side.record_copies().synchronize()

    def read(self, blocks: Sequence[int]) -> torch.Tensor:
        """See Swaps. Through the buffers too, on the compute stream."""
        contents = _images(self._device_pool, len(blocks))
        for piece, staged in self._own_pieces([(block, i) for i, block in enumerate(blocks)]):
            device_ids, places = zip(*piece, strict=True)
            self._blocks.gather(self._device_pool, self._side.upload(device_ids), staged)
            contents[places[0] : places[-1] + 1].copy_(staged)
        return contents

    def place(self, contents: torch.Tensor, pairs: Pairs) -> None:
        """See Swaps. Through the buffers too, on the compute stream."""
        for piece, staged in self._own_pieces(pairs):
            places, device_ids = zip(*piece, strict=True)
            staged.copy_(contents[list(places)])
            self._blocks.scatter(staged, self._device_pool, self._side.upload(device_ids))

    def _own_pieces(self, pairs: Pairs) -> Iterator[tuple[Pairs, torch.Tensor]]:
        """Pieces with the memory of a buffer, which the side stream does not use meanwhile."""
        for piece, buffer in self._pieces(pairs):
            if buffer.free is not None:
                self._side.compute_waits(buffer.free)
            yield piece, buffer.memory[: len(piece)]
            buffer.free = self._side.record_compute()

    def _pieces(self, pairs: Pairs) -> Iterator[tuple[Pairs, _Buffer]]:
        """The pairs in pieces that fit a buffer, with the buffers in turn."""
        size = len(self._buffers[0].memory)
        for begin in range(0, len(pairs), size):
            self._buffers.append(self._buffers.pop(0))
            yield pairs[begin : begin + size], self._buffers[-1]


def _images(pool: torch.Tensor, count: int) -> torch.Tensor:
    """Host memory for so many blocks of a pool."""
    num_layers, two, _, elements = pool.shape
    return torch.empty(count, num_layers, two, elements, dtype=pool.dtype)


def _runs(
    pool: torch.Tensor, ids: tuple[int, ...], staged: torch.Tensor
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Split ascending `ids` into runs of consecutive ids.

    Yields views [m, num_layers, 2, block_elements] of a host pool and of `staged`.
    """
    blocks = pool.permute(2, 0, 1, 3)
    for _, run in itertools.groupby(enumerate(ids), key=lambda entry: entry[1] - entry[0]):
        places = list(run)
        begin, first, count = places[0][0], places[0][1], len(places)
        yield blocks[first : first + count], staged[begin : begin + count]
