"""Interface of the kernels: what a backend computes, and on what. No models, scheduling or allocation.

A cache pool is one tensor [num_layers, 2, num_blocks, block_elements]; index 0 of the second axis holds keys,
1 values. The layout inside a block is private to the backend, so any code may move blocks but only the
backend may read them.
"""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

Pairs = Sequence[tuple[int, int]]
PADDING_SLOT = -1


SCALED_MOST = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}
"""Dtypes of caches that keep numbers with scales, and their largest number."""


def scale_bytes(dtype: torch.dtype) -> int:
    """Bytes that a cache of `dtype` takes for the scale of one token's key, or value, of one kv head: a float32, or none."""
    return 4 if dtype in SCALED_MOST else 0


def written_dtype(cache_dtype: torch.dtype) -> torch.dtype:
    """The dtype that keys and values must have to be written: the cache's, or float32 if its numbers have scales."""
    return torch.float32 if cache_dtype in SCALED_MOST else cache_dtype


@dataclass(frozen=True, slots=True)
class CacheShape:
    """Shape of one layer's share of a block: `block_elements` elements for keys and as many for values.

    A cache of int8 or float8_e4m3fn has a scale for each token and kv head, beside its numbers in the block.
    """

    block_size: int
    num_kv_heads: int
    head_dim: int

    def head_elements(self, dtype: torch.dtype) -> int:
        """Elements of one token's key (or value) of one kv head, those of its scale included."""
        return self.head_dim + scale_bytes(dtype)

    def block_elements(self, dtype: torch.dtype) -> int:
        """Elements of keys (or of values) in one block of one layer."""
        return self.block_size * self.num_kv_heads * self.head_elements(dtype)


@dataclass(frozen=True, slots=True)
class AttentionBatch:
    """Packed tokens of one step and their places in the cache; the same for all layers of a cache group.

    T packed tokens of S sequences, padding included; all tensors contiguous. `sequences`: int32 [T], its row
    of `block_tables`. `positions`: int32 [T], position in its sequence; the token attends to the keys
    0..position. `slots`: int64 [T], block id * block size + offset for the token's own key and value, or
    PADDING_SLOT: such a token is not written and its result is zero. `block_tables`: int32 [S, most blocks],
    block ids in logical order, padded with any value. `offsets` [n + 1], on the host: packed tokens
    offsets[i] : offsets[i + 1] are consecutive positions of one sequence; tokens after the last are padding.
    `lengths`: int32 [n], on the host: keys that the last of these tokens attends to, any value where there are no
    tokens; None where only the device knows, as in a recorded step. `plans`: what a backend computes once for all
    layers of the step; code that changes tensors in place must clear it.
    """

    sequences: torch.Tensor
    positions: torch.Tensor
    slots: torch.Tensor
    block_tables: torch.Tensor
    offsets: NDArray[np.int32]
    lengths: NDArray[np.int32] | None = None
    plans: dict[Hashable, Any] = field(default_factory=dict, compare=False, repr=False)

    def to(self, device: torch.device) -> "AttentionBatch":
        """The same batch with its tensors on `device`."""
        columns = (self.sequences, self.positions, self.slots, self.block_tables)
        return AttentionBatch(*(column.to(device, non_blocking=True) for column in columns), self.offsets, self.lengths)


@dataclass(frozen=True, slots=True)
class AttentionRule:
    """How scores are computed: `scale` times dot product, an optional softcap, then a causal mask.

    The softcap is `softcap` * tanh(score / softcap). `sliding_window`: a token sees itself and the
    `sliding_window - 1` keys before it; None = all. `sinks`: float32 [heads], contiguous: each query head has one score more
    in its softmax, of a key without a value (gpt-oss, arXiv 2309.17453). `chunk`: positions are divided into chunks of this
    size, and a token sees itself and the keys before it in its chunk (Llama 4); None = all. Not with a window.
    """

    scale: float
    sliding_window: int | None = None
    softcap: float | None = None
    sinks: torch.Tensor | None = field(default=None, compare=False)
    chunk: int | None = None

    def __post_init__(self) -> None:
        if self.sliding_window is not None and self.chunk is not None:
            raise ValueError(f"a sliding window ({self.sliding_window}) and chunks ({self.chunk}) exclude each other")

    @property
    def most_keys(self) -> int | None:
        """The most keys that a token sees; None = all before it."""
        return self.chunk if self.sliding_window is None else self.sliding_window

    def first_keys(self, positions: torch.Tensor) -> torch.Tensor:
        """The first key that tokens at `positions` (integers) see."""
        if self.chunk is not None:
            return positions // self.chunk * self.chunk
        if self.sliding_window is not None:
            return (positions - self.sliding_window + 1).clamp(min=0)
        return torch.zeros_like(positions)


class KernelBackend(Protocol):
    """Kernels over a paged cache. Stateless but for a workspace; the caller owns every other tensor.

    What else a backend may have is in registry.py: `decoder`, `greedy`, `limits`, `workspace_bytes`.
    `invariant`: True if a token's result is bitwise independent of the rest of the batch, of how its prompt
    was chunked and of where its blocks are. `blocks`: moves whole blocks.
    """

    name: str
    invariant: bool
    blocks: "BlockMover"

    def write_kv(
        self, key: torch.Tensor, value: torch.Tensor, cache: torch.Tensor, slots: torch.Tensor, shape: CacheShape
    ) -> None:
        """Store `key` and `value` [T, kv_heads, head_dim] (`written_dtype`) at `slots` int64 [T] of one layer.

        `cache`: [2, num_blocks, block_elements]. Tokens with PADDING_SLOT are skipped. `reference.stored` is how
        a cache with scales rounds.
        """
        ...

    def paged_attention(
        self, query: torch.Tensor, cache: torch.Tensor, batch: AttentionBatch, shape: CacheShape, rule: AttentionRule
    ) -> torch.Tensor:
        """Causal attention over the cache for prefill, chunked prefill and decode alike.

        `query`: [T, heads, head_dim], heads a multiple of kv_heads (head h reads kv head h // (heads //
        kv_heads)). Keys and values of all T tokens must have been written; the cache may have another
        dtype. Keys before a sliding window or a chunk are never read: their blocks may have been reused.
        Returns [T, heads, head_dim] of the query's dtype.
        """
        ...


class BlockMover(Protocol):
    """Moves whole blocks of [num_layers, 2, num_blocks, block_elements] pools, all layers at once. Stateless.

    On a device the current stream orders moves.
    """

    def copy(self, pool: torch.Tensor, pairs: Pairs) -> None:
        """Copy (source, destination) blocks within `pool`; all pairs read the state before the call."""
        ...

    def gather(self, pool: torch.Tensor, ids: torch.Tensor, staged: torch.Tensor) -> None:
        """Copy blocks `ids` to `staged` [n, num_layers, 2, block_elements], contiguous. `ids`: int64 [n], on the pool's device."""
        ...

    def scatter(self, staged: torch.Tensor, pool: torch.Tensor, ids: torch.Tensor) -> None:
        """Copy `staged` to blocks `ids`, which are distinct: the reverse of `gather`."""
        ...


class TorchBlocks:
    """Moves blocks by indexing, on any device."""

    def copy(self, pool: torch.Tensor, pairs: Pairs) -> None:
        """See BlockMover."""
        copy_blocks(pool, pairs)

    def gather(self, pool: torch.Tensor, ids: torch.Tensor, staged: torch.Tensor) -> None:
        """See BlockMover."""
        staged.copy_(pool[:, :, ids].permute(2, 0, 1, 3))

    def scatter(self, staged: torch.Tensor, pool: torch.Tensor, ids: torch.Tensor) -> None:
        """See BlockMover."""
        pool[:, :, ids] = staged.permute(1, 2, 0, 3)


TORCH_BLOCKS = TorchBlocks()


def copy_blocks(pool: torch.Tensor, pairs: Pairs) -> None:
    """Copy (source, destination) blocks within `pool` over all layers; all pairs read the previous state."""
    if pairs:
        columns = torch.tensor(pairs, dtype=torch.int64, device=pool.device)
        pool[:, :, columns[:, 1]] = pool[:, :, columns[:, 0]]


def swap_blocks(source_pool: torch.Tensor, destination_pool: torch.Tensor, pairs: Pairs) -> None:
    """Copy (block of `source_pool`, block of `destination_pool`) pairs over all layers; both are in host memory."""
    # Block by block: gathering them first takes three times as long.
    for source_id, destination_id in pairs:
        destination_pool[:, :, destination_id].copy_(source_pool[:, :, source_id])
