"""Division of work in Triton attention: query tiles, and ranges of their keys, which are cut on the device.

Tiles are cut on the host, but on the device in a step where each sequence has one token.

The host knows how many tokens each sequence has in a step, the device how long its context is. So the grid is
a bound that needs no lengths (no synchronisation, and usable in a CUDA graph), and `plan_kernel` divides the
keys of the step among its programs: equal ranges, as many as fill the device, none so short that launching it
costs more than it saves.
"""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
import triton
import triton.language as tl
from numpy.typing import NDArray

from paged_kernels.backend import SCALED_MOST, AttentionBatch, AttentionRule, CacheShape

# Of one program's rows in short tiles, float32: half of the registers of 4 warps.
_MOST_SUMS = 16 * 1024
_SHORT_ROWS = 16
"""Minimum rows of a matrix unit."""


ALL, WINDOW, CHUNK = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
"""Which keys a token sees: all before it, those of a sliding window, those of its chunk."""


class Span(NamedTuple):
    """`kind`: ALL, WINDOW or CHUNK, a constant of kernels. `size`: tokens of a window or a chunk."""

    kind: int
    size: int


def span_of(rule: AttentionRule) -> Span:
    """That of a layer."""
    kind = ALL if rule.most_keys is None else WINDOW if rule.chunk is None else CHUNK
    return Span(int(kind.value), rule.most_keys or 0)


@triton.jit
def first_key(positions, span, SPAN: tl.constexpr):
    """The first key that tokens at `positions`, a number or a tensor, see. Not for ALL."""
    if SPAN == WINDOW:
        return tl.maximum(positions - span + 1, 0)
    return positions // span * span


@dataclass(frozen=True, slots=True)
class Sharing:
    """How finely to split work.

    `num_programs`: programs wanted (some waves over all processors). `min_program_bytes`: minimum bytes of
    keys and values for each.
    """

    num_programs: int
    min_program_bytes: int


@dataclass(frozen=True, slots=True)
class TileShape:
    """Constants of one compiled kernel: rows of a tile, keys per iteration, warps, pipeline stages."""

    rows: int
    keys: int
    num_warps: int
    num_stages: int


@dataclass(frozen=True, slots=True)
class TilePlan:
    """Tiles of one height for one step. `tiles`: int32 [2, n], first packed token and number of tokens.

    `items`: int32 [4, most items]: tile, first key, end of keys, part (-1 = the tile's only one); the first
    `num_items` [1] are valid. `tile_parts`: int32 [2, n]: first part, number of parts (0 = not split).
    `max_parts`: upper bound of the number of parts.
    """

    shape: TileShape
    tiles: torch.Tensor
    items: torch.Tensor
    num_items: torch.Tensor
    tile_parts: torch.Tensor
    max_parts: int


def padded_dim(head_dim: int) -> int:
    """Elements of a head as kernels see it: a power of two that matrix units accept."""
    return max(16, triton.next_power_of_2(head_dim))


def heads_together(head_dim: int, group: int) -> int:
    """Query heads of one kv head that a program takes: as many as divide `group` and have their sums in registers."""
    most = max(1, _MOST_SUMS // padded_dim(head_dim))
    return next(count for count in range(min(group, most), 0, -1) if group % count == 0)


def tile_shapes(
    head_dim: int, group: int, dtype: torch.dtype, *, has_scales: bool = False
) -> tuple[TileShape, TileShape]:
    """Tiles for sequences with few tokens and with many. `has_scales`: over a cache of numbers with scales.

    They fit the shared memory of sm_80 with all their stages, and the registers of each GPU in
    `paged_kernels.resources`.
    """
    row_bytes, least = padded_dim(head_dim) * dtype.itemsize, max(_SHORT_ROWS, triton.next_power_of_2(group))
    if has_scales and row_bytes <= 512:
        keys = 64 if row_bytes <= 256 and group <= 4 else 32
        rows = 64 if row_bytes <= 256 else 32
        return TileShape(least, keys, 4, 2), TileShape(max(rows, least), keys, 4, 2)
    if row_bytes <= 256:
        return TileShape(least, 64, 4, 3), TileShape(max(128, least), 64 if row_bytes <= 128 else 32, 8, 3)
    if row_bytes <= 512:
        return TileShape(least, 32, 4, 3), TileShape(max(64, least), 32, 8, 2)
    if row_bytes <= 1024:
        return TileShape(least, 16, 4, 2), TileShape(max(32, least), 16, 4, 2)
    return TileShape(least, 16, 8, 2), TileShape(least, 16, 8, 2)


def make_plans(
    batch: AttentionBatch, shape: CacheShape, group: int, dtype: torch.dtype, span: Span, sharing: Sharing,
    cache_dtype: torch.dtype | None = None,
) -> list[TilePlan]:  # fmt: skip
    """The plans of a step for layers with equal attention: tiles of few tokens, tiles of many; empty ones are left out.

    `dtype`: of queries, and of the cache unless `cache_dtype` is given.

    Where each sequence has one token, the device cuts the tiles too: nothing is copied to it.
    """
    kept = cache_dtype or dtype
    short, tall = tile_shapes(shape.head_dim, group, dtype, has_scales=kept in SCALED_MOST)
    offsets = batch.offsets.astype(np.int32)
    counts = np.diff(offsets)
    if len(counts) and (counts == 1).all():
        return [_plan(batch, shape, short, len(counts), None, kept, span, sharing)]
    few = counts * group <= short.rows
    plans = []
    for tile, chosen in ((short, few), (tall, ~few)):
        tiles = cut(offsets, chosen, tile.rows // group)
        if tiles.shape[1]:
            plans.append(_plan(batch, shape, tile, tiles.shape[1], tiles, kept, span, sharing))
    return plans


def cut(offsets: NDArray[np.int32], chosen: NDArray[np.bool_], height: int) -> NDArray[np.int32]:
    """Tiles of at most `height` tokens of the chosen sequences: int32 [2, n], first packed token and number of tokens."""
    counts = np.where(chosen, np.diff(offsets), 0)
    num_tiles = -(-counts // height)
    of = np.repeat(np.arange(len(counts)), num_tiles)
    begins = (np.arange(len(of)) - np.repeat(np.cumsum(num_tiles) - num_tiles, num_tiles)) * height
    return np.stack([offsets[:-1][of] + begins, np.minimum(height, counts[of] - begins)]).astype(np.int32)


def _plan(
    batch: AttentionBatch, shape: CacheShape, tile: TileShape, num_tiles: int, tiles: NDArray[np.int32] | None,
    dtype: torch.dtype, span: Span, sharing: Sharing,
) -> TilePlan:  # fmt: skip
    """`tiles`: None for one token each, in order. `dtype`: of the cache."""
    device = batch.positions.device
    # At most `target` ranges of equal length plus one rest per tile: no length has to be known here. Tiles
    # that are split have less than twice as many parts as their share of `target`.
    target = max(1, sharing.num_programs // shape.num_kv_heads)
    max_items = num_tiles + target
    plan = TilePlan(
        tile,
        torch.empty(2, num_tiles, dtype=torch.int32, device=device)
        if tiles is None
        else torch.from_numpy(tiles).to(device, non_blocking=True),
        torch.empty(4, max_items, dtype=torch.int32, device=device),
        torch.empty(1, dtype=torch.int32, device=device),
        torch.empty(2, num_tiles, dtype=torch.int32, device=device),
        2 * target,
    )
    turn_bytes = tile.keys * 2 * shape.head_dim * dtype.itemsize
    block = triton.next_power_of_2(num_tiles)
    plan_kernel[(1,)](
        plan.tiles, batch.positions, plan.items, plan.num_items, plan.tile_parts, num_tiles, max_items, target,
        -(-sharing.min_program_bytes // turn_bytes), span.size,
        KEYS=tile.keys, SPAN=span.kind, CUTS=tiles is None, BLOCK=block, num_warps=4 if block <= 1024 else 16,
        enable_fp_fusion=True,
    )  # fmt: skip
    return plan


@triton.jit
def plan_kernel(
    tiles, positions, items, num_items, tile_parts, num_tiles, max_items, target, min_turns, span,
    KEYS: tl.constexpr, SPAN: tl.constexpr, CUTS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program: split the keys of all tiles into `items` of equal length; see TilePlan. A turn is KEYS keys.

    CUTS: write `tiles` of one token each, instead of reading them.
    """
    tile = tl.arange(0, BLOCK)
    real = tile < num_tiles
    if CUTS:
        first = tile
        count = tl.where(real, 1, 0)
        tl.store(tiles + tile, first, mask=real)
        tl.store(tiles + num_tiles + tile, count, mask=real)
    else:
        first = tl.load(tiles + tile, mask=real, other=0)
        count = tl.load(tiles + num_tiles + tile, mask=real, other=0)
    position = tl.load(positions + first, mask=real, other=0)
    begin = tl.zeros([BLOCK], tl.int32)
    if SPAN != ALL:
        begin = first_key(position, span, SPAN) // KEYS
    end = position + count
    turns = tl.where(real, (end + KEYS - 1) // KEYS - begin, 0)
    share = tl.maximum((tl.sum(turns, 0) + target - 1) // target, min_turns)
    ranges = (turns + share - 1) // share
    last_item = tl.cumsum(ranges, 0)
    parts = tl.where(ranges > 1, ranges, 0)
    first_part = tl.cumsum(parts, 0) - parts
    tl.store(num_items, tl.sum(ranges, 0))
    tl.store(tile_parts + tile, first_part, mask=real)
    tl.store(tile_parts + num_tiles + tile, parts, mask=real)
    # Within a tile, ranges differ by at most one turn.
    even = (turns + ranges - 1) // tl.maximum(ranges, 1)
    for i in range(0, tl.max(ranges, 0)):
        used = real & (i < ranges)
        item = items + last_item - ranges + i
        tl.store(item, tile, mask=used)
        tl.store(item + max_items, (begin + i * even) * KEYS, mask=used)
        tl.store(item + 2 * max_items, tl.minimum((begin + (i + 1) * even) * KEYS, end), mask=used)
        tl.store(item + 3 * max_items, tl.where(parts > 0, first_part + i, -1), mask=used)
