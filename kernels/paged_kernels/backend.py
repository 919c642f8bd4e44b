"""The seam of the kernels: what a backend computes, and on what. No models, no scheduling, no allocation.

A cache pool is one tensor [num_layers, 2, num_blocks, block_elements]; index 0 of the second axis holds keys, 1 values. What
lies inside a block is the backend's own business (`layout`), so blocks may be moved by anybody but read only by their backend.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

Pairs = Sequence[tuple[int, int]]
PADDING_SLOT = -1


@dataclass(frozen=True, slots=True)
class CacheShape:
    """Shape of one layer's share of a block: `block_elements` elements for keys and as many for values."""

    block_size: int
    num_kv_heads: int
    head_dim: int

    @property
    def block_elements(self) -> int:
        """Elements of keys (or of values) in one block of one layer."""
        return self.block_size * self.num_kv_heads * self.head_dim


@dataclass(frozen=True, slots=True)
class AttentionBatch:
    """Where the packed tokens of one step live; the same for all layers.

    T packed tokens of S sequences, padding included; all tensors contiguous. `sequences`: int32 [T], its row of `block_tables`;
    `positions`: int32 [T], position in its sequence, so it attends to the keys 0..position; `slots`: int64 [T], block id *
    block size + offset for the token's own key and value, or PADDING_SLOT: such a token is not written and its result is zero.
    `block_tables`: int32 [S, most blocks], block ids in logical order, padded with anything. `spans`: (first packed token,
    number of tokens) of each sequence, which are consecutive positions.
    """

    sequences: torch.Tensor
    positions: torch.Tensor
    slots: torch.Tensor
    block_tables: torch.Tensor
    offsets: NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class AttentionRule:
    """How scores are made: `scale` times dot product, `softcap` * tanh(score / softcap) where given, then a causal mask.

    `sliding_window`: a token sees itself and the `sliding_window - 1` keys before it; None = all.
    """

    scale: float
    sliding_window: int | None = None
    softcap: float | None = None


class KernelBackend(Protocol):
    """Kernels over a paged cache. Stateless; every tensor belongs to the caller.

    `invariant`: a token's result is bitwise the same whatever else is in the batch, however its prompt was cut into chunks, and
    wherever its blocks lie.
    """

    name: str
    invariant: bool

    def write_kv(
        self, key: torch.Tensor, value: torch.Tensor, cache: torch.Tensor, slots: torch.Tensor, shape: CacheShape
    ) -> None:
        """Stores `key` and `value` [T, kv_heads, head_dim] (the cache's dtype) at `slots` int64 [T] of one layer.

        `cache`: [2, num_blocks, block_elements]. Tokens with PADDING_SLOT are skipped.
        """
        ...

    def paged_attention(
        self, query: torch.Tensor, cache: torch.Tensor, batch: AttentionBatch, shape: CacheShape, rule: AttentionRule
    ) -> torch.Tensor:
        """Causal attention over the cache for prefill, chunked prefill and decode alike.

        `query`: [T, heads, head_dim], heads a multiple of kv_heads (head h reads kv head h // (heads // kv_heads)). Keys and
        values of all T tokens must have been written. Returns [T, heads, head_dim] of the query's dtype.
        """
        ...


def copy_blocks(pool: torch.Tensor, pairs: Pairs) -> None:
    """Copies blocks (source, destination) within `pool` over all layers; all pairs read the state before (R123, R124)."""
    if pairs:
        source, destination = _indexes(pairs, pool.device)
        pool[:, :, destination] = pool[:, :, source]


def swap_blocks(source_pool: torch.Tensor, destination_pool: torch.Tensor, pairs: Pairs) -> None:
    """Copies blocks (block of `source_pool`, block of `destination_pool`) over all layers, across devices (R123)."""
    if pairs:
        source, _ = _indexes(pairs, source_pool.device)
        _, destination = _indexes(pairs, destination_pool.device)
        destination_pool[:, :, destination] = source_pool[:, :, source].to(destination_pool.device)


def _indexes(pairs: Pairs, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    columns = torch.tensor(pairs, dtype=torch.int64, device=device)
    return columns[:, 0], columns[:, 1]
