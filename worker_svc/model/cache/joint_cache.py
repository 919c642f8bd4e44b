"""Pools of different shapes with the same block ids: what is moved of one is moved of all.

One may hold the model's last hidden states, each in the block of its token, for an MTP head: so prefix hits, swaps, copies and
moves of blocks carry the states that the head needs where a sequence goes on.
"""

from collections.abc import Iterable, Sequence

import torch

from paged_kernels.backend import CacheShape, Pairs
from protos.worker.v1 import worker_pb2
from worker_svc.block_images import BlockImages, pairs_of
from worker_svc.model.cache.cache_engine import CacheEngine


class JointCache:
    """A `CacheEngine` over several of the same numbers of blocks. The model's own is the first.

    The image of a block has its contents in all pools, in their order.
    """

    def __init__(self, parts: Sequence[CacheEngine]) -> None:
        self._parts = parts
        self.images = BlockImages(self.block_bytes, parts[0].device_pool.shape[2])

    @property
    def shape(self) -> CacheShape:
        """See CacheEngine: of the model's own pool."""
        return self._parts[0].shape

    @property
    def device_pool(self) -> torch.Tensor:
        """See CacheEngine: the model's own."""
        return self._parts[0].device_pool

    @property
    def host_pool(self) -> torch.Tensor:
        """See CacheEngine: the model's own."""
        return self._parts[0].host_pool

    @property
    def layout(self) -> str:
        """See CacheEngine."""
        return " + ".join(part.layout for part in self._parts)

    @property
    def block_bytes(self) -> int:
        """Bytes of a block in all pools."""
        return sum(part.block_bytes for part in self._parts)

    def expect(self, num_used: int) -> None:
        """See CacheEngine."""
        for part in self._parts:
            part.expect(num_used)

    def read(self, blocks: Sequence[int]) -> torch.Tensor:
        """See CacheEngine."""
        return torch.cat([part.read(blocks) for part in self._parts], 1)

    def place(self, placed: Iterable[worker_pb2.PlacedImage]) -> None:
        """See CacheEngine."""
        sizes = [part.block_bytes for part in self._parts]
        for each in placed:
            contents = torch.frombuffer(self.images.take(each.image), dtype=torch.uint8).view(-1, self.block_bytes)
            pairs = pairs_of(each).tolist()
            for part, own in zip(self._parts, contents.split(sizes, 1), strict=True):
                part.place_contents(own, pairs)

    def move(self, *, swap_in: Pairs, swap_out: Pairs, copies: Pairs) -> None:
        """See CacheEngine."""
        for part in self._parts:
            part.move(swap_in=swap_in, swap_out=swap_out, copies=copies)


Cache = CacheEngine | JointCache


def states_shape(block_size: int, hidden_size: int) -> CacheShape:
    """The shape of a block's hidden states in a `CacheEngine`: half of a state is stored as a key, half as a value."""
    return CacheShape(block_size, 1, hidden_size // 2)


class KeptStates:
    """Last hidden states by slot, in `pool`, [1, 2, num_blocks, block size * hidden size / 2]."""

    def __init__(self, pool: torch.Tensor, block_size: int) -> None:
        self._halves = pool.view(2, pool.shape[2] * block_size, -1)

    def put(self, states: torch.Tensor, slots: torch.Tensor) -> None:
        """Store `states` [T, hidden size] of the tokens at `slots` [T]."""
        halves = states.to(self._halves.dtype).unflatten(1, (2, -1)).transpose(0, 1)
        self._halves.index_copy_(1, slots, halves)

    def take(self, slots: torch.Tensor) -> torch.Tensor:
        """States [T, hidden size] of the tokens at `slots` [T]."""
        return self._halves.index_select(1, slots).transpose(0, 1).flatten(1)
