"""Triton kernels of paged attention: one tile of query rows over one range of keys, and the sum of a tile's ranges.

Decode, chunks and prefill are the same kernel with tiles of different height. A tile is `TOKENS` consecutive
tokens of one sequence times query heads that share a kv head (`GROUP`: all of them, or as many as the registers hold), so that
keys are read once for all of these:

    row of a tile   0 .. GROUP - 1   GROUP .. 2 * GROUP - 1   ...   rest up to ROWS
    is              token 0's heads  token 1's heads                nothing

Long contexts with few tiles are split into ranges computed by different programs ("flash decoding", Dao et
al. 2023), as planned by `tile_plan.py`. Softmax is online, in base 2 and float32 (Milakov and Gimelshein
2018). Keys that a sequence does not hold are never loaded, so stale blocks may contain anything. Block
layout: [kv_heads, block_size, head_dim] for keys and for values; with scales: scaled_cache.py.
"""

import triton
import triton.language as tl

from paged_kernels.gpu.scaled_cache import PLAIN, elements_of, floats_of, range_of, scale_place
from paged_kernels.gpu.tile_plan import ALL, first_key

LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def dot(a, b, UPCAST: tl.constexpr):
    """Matrix product in float32. UPCAST: the interpreter cannot multiply bfloat16."""
    if UPCAST:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), input_precision="ieee")
    return tl.dot(a, b, input_precision="ieee")


@triton.jit
def attend(
    queries, acc, peak, total, keys, values, key_scales, value_scales, table, low, high, begin, end, positions, kv_head,
    scale, softcap, span, HEAD_DIM: tl.constexpr, PADDED_DIM: tl.constexpr, KV_HEADS: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    KEYS: tl.constexpr, SPAN: tl.constexpr, HAS_SOFTCAP: tl.constexpr, MASKED: tl.constexpr, FORM: tl.constexpr,
    UPCAST: tl.constexpr,
):  # fmt: skip
    """Continue an online softmax over keys `low` (a multiple of KEYS) up to `high`.

    State: `acc` [ROWS, PADDED_DIM], `peak` and `total` [ROWS]. Keys in [begin, end) exist. If not MASKED, the
    whole range exists and every row sees it.
    """
    dims = tl.arange(0, PADDED_DIM)
    for start in range(low, high, KEYS):
        places = start + tl.arange(0, KEYS)
        exists = (places >= begin) & (places < end)
        blocks = tl.load(table + places // BLOCK_SIZE, mask=exists, other=0).to(tl.int64)
        head = blocks * KV_HEADS + kv_head
        at = head * (BLOCK_SIZE * elements_of(FORM, HEAD_DIM)) + places % BLOCK_SIZE * HEAD_DIM
        scale_at = scale_place(head, places % BLOCK_SIZE, HEAD_DIM, BLOCK_SIZE)
        held = exists[:, None] & (dims < HEAD_DIM)[None, :]
        key = floats_of(tl.load(keys + at[:, None] + dims[None, :], mask=held, other=0), FORM, queries.dtype)
        scores = dot(queries, tl.trans(key), UPCAST) * scale
        if FORM != PLAIN:
            scores = scores * (tl.load(key_scales + scale_at, mask=exists, other=0.0) * range_of(FORM))[None, :]
        if HAS_SOFTCAP:
            # tanh(x) = 1 - 2 / (exp(2 x) + 1), which is accurate at both ends.
            scores = softcap * (1.0 - 2.0 / (tl.exp(2.0 * (scores / softcap)) + 1.0))
        scores = scores * LOG2_E
        if MASKED:
            seen = exists[None, :] & (places[None, :] <= positions[:, None])
            if SPAN != ALL:
                seen = seen & (places[None, :] >= first_key(positions, span, SPAN)[:, None])
            scores = tl.where(seen, scores, float("-inf"))
        new_peak = tl.maximum(peak, tl.max(scores, 1))
        base = tl.where(new_peak == float("-inf"), 0.0, new_peak)
        weights = tl.exp2(scores - base[:, None])
        fade = tl.exp2(peak - base)
        total = total * fade + tl.sum(weights, 1)
        value = floats_of(tl.load(values + at[:, None] + dims[None, :], mask=held, other=0), FORM, queries.dtype)
        if FORM != PLAIN:
            weights = weights * (tl.load(value_scales + scale_at, mask=exists, other=0.0) * range_of(FORM))[None, :]
        acc = acc * fade[:, None] + dot(weights.to(value.dtype), value, UPCAST)
        peak = new_peak
    return acc, peak, total


@triton.jit
def with_sink(total, peak, sink):
    """Sums of weights relative to `peak`, in base 2, with the weight of one score more. Rows that saw no key keep 0."""
    base = tl.where(peak == float("-inf"), float("inf"), peak)
    return total + tl.exp2(sink * LOG2_E - base)


@triton.jit
def attention_kernel(
    query, query_stride, out, keys, values, key_scales, value_scales, tables, sequences, slots, positions, tiles, items, num_items,
    partial, logs, num_tiles, max_items, table_stride, scale, softcap, span, sinks,
    GROUP: tl.constexpr, GROUPS: tl.constexpr, KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, PADDED_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr,
    SPAN: tl.constexpr, HAS_SOFTCAP: tl.constexpr, HAS_SINKS: tl.constexpr, FORM: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """Program (item, group): one range of keys for one tile; see `tile_plan.TilePlan` for the tensors that define it.

    A group is GROUP query heads of one kv head; GROUPS of them are all heads. A tile with one range is written to `out`
    [T, heads, HEAD_DIM]. The parts of other tiles, each normalised, go to `partial` [part, group, ROWS, HEAD_DIM] with
    the base-2 logarithm of their weight in `logs` [part, group, ROWS].
    """
    item = tl.program_id(0)
    group = tl.program_id(1)
    kv_head = group // (GROUPS // KV_HEADS)
    if item < tl.load(num_items):
        tile = tl.load(items + item)
        low = tl.load(items + max_items + item)
        high = tl.load(items + 2 * max_items + item)
        part = tl.load(items + 3 * max_items + item)
        first = tl.load(tiles + tile)
        count = tl.load(tiles + num_tiles + tile)
        position = tl.load(positions + first)
        table = tables + tl.load(sequences + first).to(tl.int64) * table_stride
        rows = tl.arange(0, ROWS)
        dims = tl.arange(0, PADDED_DIM)
        tokens = rows // GROUP
        real = tokens < count
        heads = group * GROUP + rows % GROUP
        at = (first + tokens).to(tl.int64) * (GROUPS * GROUP) + heads
        places = at[:, None] * HEAD_DIM + dims[None, :]
        held = real[:, None] & (dims < HEAD_DIM)[None, :]
        read = (first + tokens).to(tl.int64) * query_stride + heads * HEAD_DIM
        queries = tl.load(query + read[:, None] + dims[None, :], mask=held, other=0.0)
        row_positions = tl.where(real, position + tokens, -1)
        acc = tl.zeros([ROWS, PADDED_DIM], tl.float32)
        peak = tl.full([ROWS], float("-inf"), tl.float32)
        total = tl.zeros([ROWS], tl.float32)
        end = position + count
        begin = 0
        # Every row sees the keys before the first row's position, except those outside a window or chunk.
        bare = tl.minimum(high, (position + 1) // KEYS * KEYS)
        if SPAN != ALL:
            begin = first_key(position, span, SPAN)
            bare = low
        else:
            acc, peak, total = attend(
                queries, acc, peak, total, keys, values, key_scales, value_scales, table, low, bare, begin, end,
                row_positions, kv_head, scale, softcap, span, HEAD_DIM, PADDED_DIM, KV_HEADS, BLOCK_SIZE, KEYS,
                SPAN, HAS_SOFTCAP, False, FORM, UPCAST,
            )  # fmt: skip
        acc, peak, total = attend(
            queries, acc, peak, total, keys, values, key_scales, value_scales, table, tl.maximum(low, bare), high, begin,
            end, row_positions, kv_head, scale, softcap, span, HEAD_DIM, PADDED_DIM, KV_HEADS, BLOCK_SIZE, KEYS,
            SPAN, HAS_SOFTCAP, True, FORM, UPCAST,
        )  # fmt: skip
        if HAS_SINKS:  # noqa: SIM102 (so it is pruned where there are none)
            if part < 0:  # a part of a tile leaves it to `combine_kernel`
                total = with_sink(total, peak, tl.load(sinks + heads))
        # Rows that saw no key become 0, with no weight; NaN stays NaN.
        divisor = tl.where(total == 0.0, 1.0, total)
        result = acc / divisor[:, None]
        if part < 0:
            written = tl.load(slots + first + tokens, mask=real, other=-1) >= 0
            result = tl.where(written[:, None], result, 0.0)
            tl.store(out + places, result.to(out.dtype.element_ty), mask=held)
        else:
            line = (part.to(tl.int64) * GROUPS + group) * ROWS + rows
            tl.store(partial + line[:, None] * HEAD_DIM + dims[None, :], result, mask=held)
            tl.store(logs + line, tl.where(total == 0.0, float("-inf"), peak + tl.log2(divisor)))


@triton.jit
def combine_kernel(
    out, slots, tiles, tile_parts, partial, logs, num_tiles, sinks,
    GROUP: tl.constexpr, GROUPS: tl.constexpr, HEAD_DIM: tl.constexpr, PADDED_DIM: tl.constexpr, ROWS: tl.constexpr,
    PIECE: tl.constexpr, HAS_SINKS: tl.constexpr,
):  # fmt: skip
    """Program (tile, group, piece): write the weighted sum of the tile's parts, if it has any, to `out`.

    A piece is PIECE rows of the tile, as many as fit into registers.
    """
    tile = tl.program_id(0)
    group = tl.program_id(1)
    begin = tl.load(tile_parts + tile)
    num_parts = tl.load(tile_parts + num_tiles + tile)
    if num_parts > 0:
        first = tl.load(tiles + tile)
        count = tl.load(tiles + num_tiles + tile)
        rows = tl.program_id(2) * PIECE + tl.arange(0, PIECE)
        dims = tl.arange(0, PADDED_DIM)
        tokens = rows // GROUP
        real = tokens < count
        held = real[:, None] & (dims < HEAD_DIM)[None, :]
        acc = tl.zeros([PIECE, PADDED_DIM], tl.float32)
        peak = tl.full([PIECE], float("-inf"), tl.float32)
        total = tl.zeros([PIECE], tl.float32)
        line = (begin.to(tl.int64) * GROUPS + group) * ROWS + rows
        for _ in range(0, num_parts):
            log = tl.load(logs + line, mask=real, other=float("-inf"))
            new_peak = tl.maximum(peak, log)
            base = tl.where(new_peak == float("-inf"), 0.0, new_peak)
            weight = tl.exp2(log - base)
            fade = tl.exp2(peak - base)
            piece = tl.load(partial + line[:, None] * HEAD_DIM + dims[None, :], mask=held, other=0.0)
            acc = acc * fade[:, None] + piece * weight[:, None]
            total = total * fade + weight
            peak = new_peak
            line += GROUPS * ROWS
        if HAS_SINKS:
            total = with_sink(total, peak, tl.load(sinks + group * GROUP + rows % GROUP))
        at = ((first + tokens).to(tl.int64) * GROUPS + group) * GROUP + rows % GROUP
        written = tl.load(slots + first + tokens, mask=real, other=-1) >= 0
        result = tl.where(written[:, None], acc / tl.where(total == 0.0, 1.0, total)[:, None], 0.0)
        tl.store(out + at[:, None] * HEAD_DIM + dims[None, :], result.to(out.dtype.element_ty), mask=held)
