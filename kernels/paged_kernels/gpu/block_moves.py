"""Triton kernels that move keys, values and blocks: cache writes, copies within a pool, and from and to a contiguous buffer.

Blocks are moved as they are, by id, whatever they contain. A move of many blocks over all layers is one launch.
"""

import torch
import triton
import triton.language as tl

from paged_kernels.backend import CacheShape, Pairs
from paged_kernels.gpu.scaled_cache import (
    PLAIN,
    elements_of,
    form_of,
    magnitudes,
    numbers_and_scales,
    numbers_of,
    scale_place,
    scales_for,
)

_MOST_ROWS, _ELEMENTS = 32, 8192
"""Of a program that writes into a cache: rows, and their elements, which the registers hold."""
_PIECE = 2048


@triton.jit
def write_kernel(
    key, value, keys, values, key_scales, value_scales, slots, num_rows, key_stride, value_stride,
    KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, PADDED_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr, ROWS: tl.constexpr,
    FORM: tl.constexpr,
):  # fmt: skip
    """Program i: write ROWS pairs (token, kv head) of [tokens, KV_HEADS, HEAD_DIM] to their slots.

    Layout as in attention.py.
    """
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    dims = tl.arange(0, PADDED_DIM)
    tokens = (rows // KV_HEADS).to(tl.int64)
    heads = rows % KV_HEADS
    slot = tl.load(slots + tokens, mask=rows < num_rows, other=-1)
    # Rows without a slot use slot 0 and are masked.
    kept = slot >= 0
    slot = tl.where(kept, slot, 0)
    head = (slot // BLOCK_SIZE) * KV_HEADS + heads
    to = (head * (BLOCK_SIZE * elements_of(FORM, HEAD_DIM)) + slot % BLOCK_SIZE * HEAD_DIM)[:, None] + dims[None, :]
    scale_to = scale_place(head, slot % BLOCK_SIZE, HEAD_DIM, BLOCK_SIZE)
    held = kept[:, None] & (dims < HEAD_DIM)[None, :]
    source = (heads * HEAD_DIM)[:, None] + dims[None, :]
    read = tl.load(key + (tokens * key_stride)[:, None] + source, mask=held, other=0.0)
    write_rows(keys, key_scales, to, scale_to, read, held, kept, FORM)
    read = tl.load(value + (tokens * value_stride)[:, None] + source, mask=held, other=0.0)
    write_rows(values, value_scales, to, scale_to, read, held, kept, FORM)


@triton.jit
def write_rows(numbers, scales, to, scale_to, rows, held, kept, FORM: tl.constexpr):
    """Write each row's elements, and its scale if the cache has scales."""
    factor = tl.zeros([rows.shape[0]], tl.float32)
    if FORM != PLAIN:
        scale, factor = scales_for(tl.max(magnitudes(rows.to(tl.float32)), 1), FORM)
        tl.store(scales + scale_to, scale, mask=kept)
    tl.store(numbers + to, numbers_of(rows, factor[:, None], FORM, numbers.dtype.element_ty), mask=held)


@triton.jit
def move_kernel(
    source, destination, source_ids, destination_ids, planes, elements, source_plane, source_block, destination_plane,
    destination_block, PIECE: tl.constexpr,
):  # fmt: skip
    """Program (pair * planes + plane, piece): copy a piece of a block's share of one layer's keys or values.

    Pools are [planes, blocks, elements] with any strides of the first two axes.
    """
    pair = tl.program_id(0) // planes
    plane = (tl.program_id(0) % planes).to(tl.int64)
    at = tl.program_id(1) * PIECE + tl.arange(0, PIECE)
    held = at < elements
    read = source + plane * source_plane + tl.load(source_ids + pair) * source_block
    written = destination + plane * destination_plane + tl.load(destination_ids + pair) * destination_block
    tl.store(written + at, tl.load(read + at, mask=held), mask=held)


def write_kv(
    key: torch.Tensor, value: torch.Tensor, cache: torch.Tensor, slots: torch.Tensor, shape: CacheShape
) -> None:
    """See KernelBackend. A token's heads must be contiguous; tokens may be strided."""
    key, value = tokens_apart(key), tokens_apart(value)
    num_rows = len(slots) * shape.num_kv_heads
    (keys, values), scales = numbers_and_scales(cache, shape)
    padded = triton.next_power_of_2(shape.head_dim)
    rows = min(_MOST_ROWS, max(1, _ELEMENTS // padded))
    if num_rows:
        write_kernel[(triton.cdiv(num_rows, rows),)](
            key, value, keys, values, scales[0], scales[1], slots, num_rows, key.stride(0), value.stride(0),
            KV_HEADS=shape.num_kv_heads, HEAD_DIM=shape.head_dim, PADDED_DIM=padded,
            BLOCK_SIZE=shape.block_size, ROWS=rows, FORM=form_of(cache.dtype), enable_fp_fusion=True,
        )  # fmt: skip


def tokens_apart(x: torch.Tensor) -> torch.Tensor:
    """[T, heads, head_dim] with each token's heads contiguous, while tokens may be strided; a copy if they are not."""
    return x if x.stride(2) == 1 and x.stride(1) == x.shape[2] else x.contiguous()


class TritonBlocks:
    """backend.BlockMover on a device, with Triton: one launch for all blocks and layers."""

    def copy(self, pool: torch.Tensor, pairs: Pairs) -> None:
        """See BlockMover."""
        if not pairs:
            return
        sources, destinations = _columns(pairs, pool.device)
        if {source for source, _ in pairs}.isdisjoint(destination for _, destination in pairs):
            _move(pool, sources, pool, destinations)
            return
        sizes = (len(pairs), *pool.shape[:2], pool.shape[3])
        staged = torch.empty(sizes, dtype=pool.dtype, device=pool.device)
        self.gather(pool, sources, staged)
        self.scatter(staged, pool, destinations)

    def gather(self, pool: torch.Tensor, ids: torch.Tensor, staged: torch.Tensor) -> None:
        """See BlockMover."""
        _move(pool, ids, staged.permute(1, 2, 0, 3), torch.arange(len(ids), device=pool.device))

    def scatter(self, staged: torch.Tensor, pool: torch.Tensor, ids: torch.Tensor) -> None:
        """See BlockMover."""
        _move(staged.permute(1, 2, 0, 3), torch.arange(len(ids), device=pool.device), pool, ids)


def _as_bytes(pool: torch.Tensor) -> torch.Tensor:
    """E4M3 numbers as bytes: not all GPUs have the type."""
    return pool.view(torch.uint8) if pool.dtype == torch.float8_e4m3fn else pool


def _columns(pairs: Pairs, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    columns = torch.tensor(pairs, dtype=torch.int64).T.contiguous().to(device, non_blocking=True)
    return columns[0], columns[1]


def _move(
    source: torch.Tensor, source_ids: torch.Tensor, destination: torch.Tensor, destination_ids: torch.Tensor
) -> None:
    source, destination = (_as_bytes(pool.view(-1, *pool.shape[2:])) for pool in (source, destination))
    planes, _, elements = source.shape
    move_kernel[(len(source_ids) * planes, triton.cdiv(elements, _PIECE))](
        source, destination, source_ids, destination_ids, planes, elements, source.stride(0), source.stride(1),
        destination.stride(0), destination.stride(1), PIECE=_PIECE, enable_fp_fusion=True,
    )  # fmt: skip
