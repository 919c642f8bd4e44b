"""The model's last hidden states, kept in the blocks of their tokens for an MTP head.

So prefix hits, swaps, copies and moves of blocks carry the states that the head needs where a sequence goes on.
"""

import torch

from paged_kernels.backend import CacheShape


def shape_of(block_size: int, hidden_size: int) -> CacheShape:
    """The shape of a block's states in a `CacheEngine`: half of a state is stored as a key, half as a value."""
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
