"""Triton kernels of a decoder between its matrix products: lookup, norms, gates, rotation with the cache write, inputs of a step.

Each reads and writes its rows once, computes in float32 and rounds once.
"""

import torch
import triton
import triton.language as tl

from paged_kernels.backend import PADDING_SLOT, AttentionBatch, CacheShape
from paged_kernels.decoder import FixedColumns, KeptRows
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
from paged_kernels.program import Activation, Embed, Norm, RotateAndStore

_PIECE = 1024
_HEADS = 8
_MOST_WARPS = 16


@triton.jit
def embed_kernel(token_ids, table, out, scale, WIDTH: tl.constexpr, PIECE: tl.constexpr):
    """Program (row, piece): a piece of the row of `table` with the row's token id, times `scale`."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * PIECE + tl.arange(0, PIECE)
    token = tl.load(token_ids + row).to(tl.int64)
    read = tl.load(table + token * WIDTH + at, mask=at < WIDTH, other=0.0).to(tl.float32)
    tl.store(out + row * WIDTH + at, (read * scale).to(out.dtype.element_ty), mask=at < WIDTH)


@triton.jit
def norm_kernel(
    source, target, weight, eps, WIDTH: tl.constexpr, PADDED: tl.constexpr, ONE_PLUS: tl.constexpr, ADDS: tl.constexpr,
):  # fmt: skip
    """Program i: row i of `target` (+)= the norm of row i of `source`, see `program.Norm`."""
    at = tl.arange(0, PADDED)
    held = at < WIDTH
    places = tl.program_id(0).to(tl.int64) * WIDTH + at
    x = tl.load(source + places, mask=held, other=0.0).to(tl.float32)
    factor = tl.load(weight + at, mask=held, other=0.0).to(tl.float32)
    if ONE_PLUS:
        factor += 1.0
    made = x * tl.rsqrt(tl.sum(x * x, 0) / WIDTH + eps) * factor
    if ADDS:
        made += tl.load(target + places, mask=held, other=0.0).to(tl.float32)
    tl.store(target + places, made.to(target.dtype.element_ty), mask=held)


@triton.jit
def gated_kernel(both, out, WIDTH: tl.constexpr, PIECE: tl.constexpr, IS_SILU: tl.constexpr):
    """Program (row, piece): activation(gate) * up for a piece of WIDTH elements; `both` has gates, then ups, in each row."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * PIECE + tl.arange(0, PIECE)
    held = at < WIDTH
    gate = tl.load(both + row * (2 * WIDTH) + at, mask=held, other=0.0).to(tl.float32)
    up = tl.load(both + row * (2 * WIDTH) + WIDTH + at, mask=held, other=0.0).to(tl.float32)
    if IS_SILU:
        exponent = -gate
    else:  # 0.5 x (1 + tanh(y)) = x / (1 + exp(-2 y)), the approximation of GELU
        inner = 0.7978845608028654 * (gate + 0.044715 * gate * gate * gate)
        exponent = -2.0 * inner
    active = gate / (1.0 + tl.exp(tl.minimum(exponent, 80.0)))  # beyond that it is 0, and exp would overflow
    tl.store(out + row * WIDTH + at, (active * up).to(out.dtype.element_ty), mask=held)


@triton.jit
def rotate_kernel(
    heads, keys, values, key_scales, value_scales, slots, positions, cosines, sines, query_weight, key_weight, eps,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, HALF: tl.constexpr, HALF_PADDED: tl.constexpr,
    REST: tl.constexpr, REST_PADDED: tl.constexpr, BLOCK_SIZE: tl.constexpr, PIECE: tl.constexpr, ROTATES: tl.constexpr,
    HAS_NORM: tl.constexpr, ONE_PLUS: tl.constexpr, FORM: tl.constexpr,
):  # fmt: skip
    """Program (token, piece of heads): norm and rotate queries in place; keys and values to the token's slot.

    A row of `heads` is HEADS queries, KV_HEADS keys and KV_HEADS values. Elements i and HALF + i of a head turn together,
    so each thread holds both; the REST of a head does not turn. Layout of the cache as in attention.py.
    """
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * PIECE + tl.arange(0, PIECE)
    half = tl.arange(0, HALF_PADDED)
    is_query = head < HEADS
    is_value = head >= HEADS + KV_HEADS
    is_real = head < HEADS + 2 * KV_HEADS
    at = token * ((HEADS + 2 * KV_HEADS) * HEAD_DIM) + head * HEAD_DIM
    first_at = heads + at[:, None] + half[None, :]
    in_half = is_real[:, None] & (half < HALF)[None, :]
    first = tl.load(first_at, mask=in_half, other=0.0).to(tl.float32)
    second = tl.load(first_at + HALF, mask=in_half, other=0.0).to(tl.float32)
    rest = tl.zeros([PIECE, REST_PADDED], tl.float32)
    tail = tl.arange(0, REST_PADDED)
    in_rest = is_real[:, None] & (tail < REST)[None, :]
    rest_at = heads + at[:, None] + 2 * HALF + tail[None, :]
    if REST > 0:
        rest = tl.load(rest_at, mask=in_rest, other=0.0).to(tl.float32)
    if HAS_NORM:
        squares = tl.sum(first * first, 1) + tl.sum(second * second, 1) + tl.sum(rest * rest, 1)
        scale = tl.where(is_value, 1.0, tl.rsqrt(squares / HEAD_DIM + eps))[:, None]
        first = first * scale * weights_of(query_weight, key_weight, half, HALF, is_query, is_value, ONE_PLUS)
        second = (
            second
            * scale
            * weights_of(query_weight + HALF, key_weight + HALF, half, HALF, is_query, is_value, ONE_PLUS)
        )
        if REST > 0:
            rest = (
                rest
                * scale
                * weights_of(query_weight + 2 * HALF, key_weight + 2 * HALF, tail, REST, is_query, is_value, ONE_PLUS)
            )
    if ROTATES:
        angle = tl.load(positions + token).to(tl.int64) * (2 * HALF) + half
        turned = first * angles_of(cosines, angle, half < HALF, is_value, 1.0) - second * angles_of(
            sines, angle, half < HALF, is_value, 0.0
        )
        second = second * angles_of(cosines, angle + HALF, half < HALF, is_value, 1.0) + first * angles_of(
            sines, angle + HALF, half < HALF, is_value, 0.0
        )
        first = turned
    kind = heads.dtype.element_ty
    written = in_half & is_query[:, None]
    tl.store(first_at, first.to(kind), mask=written)
    tl.store(first_at + HALF, second.to(kind), mask=written)
    if REST > 0 and HAS_NORM:
        tl.store(rest_at, rest.to(kind), mask=in_rest & is_query[:, None])
    slot = tl.load(slots + token) + head * 0  # one for each head: the interpreter joins conditions of one shape
    is_kept = slot >= 0
    slot = tl.where(is_kept, slot, 0)
    kv_head = tl.where(is_value, head - HEADS - KV_HEADS, tl.where(is_query, 0, head - HEADS))
    store_heads(
        keys, values, key_scales, value_scales, slot // BLOCK_SIZE * KV_HEADS + kv_head, slot % BLOCK_SIZE,
        # Rounded to the rows' type first, as modules hand keys and values over.
        first.to(kind), second.to(kind), rest.to(kind), in_half, in_rest,
        is_real & is_kept & (head >= HEADS) & (head < HEADS + KV_HEADS), is_real & is_kept & is_value,
        HEAD_DIM, BLOCK_SIZE, HALF, REST, FORM,
    )  # fmt: skip


@triton.jit
def store_heads(
    keys, values, key_scales, value_scales, of_block, offset, first, second, rest, in_half, in_rest, is_key, is_value,
    HEAD_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr, HALF: tl.constexpr, REST: tl.constexpr, FORM: tl.constexpr,
):  # fmt: skip
    """Write the parts of each head to token `offset` of kv head `of_block` of all blocks, and its scale where it has one."""
    half = tl.arange(0, first.shape[1])
    tail = tl.arange(0, rest.shape[1])
    to = (of_block * (BLOCK_SIZE * elements_of(FORM, HEAD_DIM)) + offset * HEAD_DIM)[:, None]
    factor = tl.zeros([first.shape[0]], tl.float32)
    if FORM != PLAIN:
        largest = tl.maximum(largest_of(first), largest_of(second))
        if REST > 0:
            largest = tl.maximum(largest, largest_of(rest))
        scale, factor = scales_for(largest, FORM)
        scale_to = scale_place(of_block, offset, HEAD_DIM, BLOCK_SIZE)
        tl.store(key_scales + scale_to, scale, mask=is_key)
        tl.store(value_scales + scale_to, scale, mask=is_value)
    store_part(keys, values, to + half[None, :], first, factor, in_half, is_key, is_value, FORM)
    store_part(keys, values, to + HALF + half[None, :], second, factor, in_half, is_key, is_value, FORM)
    if REST > 0:
        store_part(keys, values, to + 2 * HALF + tail[None, :], rest, factor, in_rest, is_key, is_value, FORM)


@triton.jit
def largest_of(part):
    """Bits of the largest magnitude of a part of each head."""
    return tl.max(magnitudes(part.to(tl.float32)), 1)


@triton.jit
def store_part(keys, values, at, part, factor, held, is_key, is_value, FORM: tl.constexpr):
    """Write a part of each head, where it is held, to the keys or to the values in the cache. `factor`: of scaled numbers."""
    stored = numbers_of(part, factor[:, None], FORM, keys.dtype.element_ty)
    tl.store(keys + at, stored, mask=held & is_key[:, None])
    tl.store(values + at, stored, mask=held & is_value[:, None])


@triton.jit
def weights_of(queries, keys, at, COUNT: tl.constexpr, is_query, is_value, ONE_PLUS: tl.constexpr):
    """Factors of a part of each head: of queries, of keys, and 1 for values."""
    query = tl.load(queries + at, mask=at < COUNT, other=0.0).to(tl.float32)
    key = tl.load(keys + at, mask=at < COUNT, other=0.0).to(tl.float32)
    if ONE_PLUS:
        query += 1.0
        key += 1.0
    found = tl.where(is_query[:, None], query[None, :], key[None, :])
    return tl.where(is_value[:, None], 1.0, found)


@triton.jit
def angles_of(table, at, held, is_value, still):
    """Cosines or sines at a position, for each head; `still` for values, which do not turn."""
    found = tl.load(table + at, mask=held, other=0.0).to(tl.float32)
    return tl.where(is_value[:, None], still, found[None, :])


@triton.jit
def begin_kernel(
    rows, kept_ids, kept_positions, block_tables, group_stride, table_stride, to_ids, to_sequences, to_positions, to_slots,
    slot_stride, to_drawn, BLOCK_SIZE: tl.constexpr,
):  # fmt: skip
    """Program (i, g): what row i of a step computes, from what is kept of its sequence, with its slot in cache group g.

    Padding writes nowhere.
    """
    i, group = tl.program_id(0), tl.program_id(1)
    row = tl.load(rows + i)
    is_row = row >= 0
    position = tl.load(kept_positions + row, mask=is_row, other=0)
    table = block_tables + group.to(tl.int64) * group_stride + row.to(tl.int64) * table_stride
    block = tl.load(table + position // BLOCK_SIZE, mask=is_row, other=0).to(tl.int64)
    tl.store(to_ids + i, tl.load(kept_ids + row, mask=is_row, other=0))
    tl.store(to_sequences + i, tl.where(is_row, row, 0))
    tl.store(to_positions + i, position)
    tl.store(to_slots + group * slot_stride + i, tl.where(is_row, block * BLOCK_SIZE + position % BLOCK_SIZE, -1))
    tl.store(to_drawn + i, position.to(tl.int64) + 1)


# --- launches --------------------------------------------------------------------------------------------------------


def embed(op: Embed, token_ids: torch.Tensor) -> torch.Tensor:
    """[T, width] of `token_ids` [T]."""
    width = op.table.shape[1]
    out = op.table.new_empty(len(token_ids), width)
    embed_kernel[(len(token_ids), triton.cdiv(width, _PIECE))](
        token_ids, op.table, out, float(op.scale), WIDTH=width, PIECE=_PIECE, enable_fp_fusion=True
    )
    return out


def norm(op: Norm, source: torch.Tensor, target: torch.Tensor) -> None:
    """Write to `target` [T, width], or add to it. It may be `source`."""
    padded = triton.next_power_of_2(source.shape[1])
    norm_kernel[(len(source),)](
        source, target, op.weight, float(op.eps), WIDTH=source.shape[1], PADDED=padded, ONE_PLUS=op.one_plus, ADDS=op.adds,
        num_warps=min(_MOST_WARPS, max(1, padded // 512)), enable_fp_fusion=True,
    )  # fmt: skip


def gated(both: torch.Tensor, activation: Activation) -> torch.Tensor:
    """[T, width] of gates and ups side by side, [T, 2 * width]."""
    width = both.shape[1] // 2
    out = both.new_empty(len(both), width)
    gated_kernel[(len(both), triton.cdiv(width, _PIECE))](
        both, out, WIDTH=width, PIECE=_PIECE, IS_SILU=activation == "silu", enable_fp_fusion=True
    )
    return out


def rotate_and_store(
    op: RotateAndStore, heads: torch.Tensor, num_heads: int, cache: torch.Tensor, batch: AttentionBatch, shape: CacheShape,
) -> None:  # fmt: skip
    """See program.RotateAndStore. `heads`: [T, all heads * head_dim]. `cache`: of the layer. Keys stay as they were in `heads`."""
    head_dim = shape.head_dim
    count = heads.shape[1] // head_dim
    turns, norms = op.cosines is not None, op.norm
    half = (op.cosines.shape[1] if op.cosines is not None else head_dim) // 2
    rest = head_dim - 2 * half
    (keys, values), scales = numbers_and_scales(cache, shape)
    some = heads  # for pointers that are not used
    rotate_kernel[(len(heads), triton.cdiv(count, _HEADS))](
        heads, keys, values, scales[0], scales[1], batch.slots, batch.positions, op.cosines if turns else some,
        op.sines if turns else some, some if norms is None else norms.queries, some if norms is None else norms.keys,
        0.0 if norms is None else float(norms.eps), HEADS=num_heads, KV_HEADS=(count - num_heads) // 2, HEAD_DIM=head_dim,
        HALF=half, HALF_PADDED=triton.next_power_of_2(half), REST=rest, REST_PADDED=triton.next_power_of_2(max(rest, 1)),
        BLOCK_SIZE=shape.block_size, PIECE=_HEADS, ROTATES=turns, HAS_NORM=norms is not None,
        ONE_PLUS=norms is not None and norms.one_plus, FORM=form_of(cache.dtype), enable_fp_fusion=True,
    )  # fmt: skip


def begin_step(
    columns: FixedColumns,
    kept: KeptRows,
    to_ids: torch.Tensor,
    to: AttentionBatch,
    to_slots: torch.Tensor,
    to_drawn: torch.Tensor,
    block_size: int,
) -> None:
    """Write the inputs of a step of the first rows of `columns`.

    `to_slots`: int64 [cache groups, at least these rows]. `to_drawn`: int64, the positions of the tokens to be drawn.
    """
    assert PADDING_SLOT == -1
    tables = kept.block_tables
    begin_kernel[(len(to.slots), len(tables))](
        columns.rows, kept.token_ids, kept.positions, tables, tables.stride(0), tables.stride(1), to_ids, to.sequences,
        to.positions, to_slots, to_slots.stride(0), to_drawn, BLOCK_SIZE=block_size, enable_fp_fusion=True,
    )  # fmt: skip
