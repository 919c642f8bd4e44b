"""Numbers with scales in a cache: int8 and E4M3, as `reference.stored` defines them, in Triton.

A kv head of a block is [block_size, head_dim] numbers, then its float32 scales, [block_size]. E4M3 numbers are read and
written as bytes, so that GPUs without such a type have them too.
"""

import torch
import triton
import triton.language as tl

from paged_kernels.backend import SCALED_MOST, CacheShape

PLAIN, INT8, FLOAT8 = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
"""Forms of a cache: numbers of its type without scales, and those with scales."""
_FORMS = {torch.int8: 1, torch.float8_e4m3fn: 2}
_LEAST = tl.constexpr(1e-30)
_NOT_FINITE = tl.constexpr(0x7F800000)
_SIGN = tl.constexpr(0x7FFFFFFF)


@triton.jit
def elements_of(FORM: tl.constexpr, HEAD_DIM: tl.constexpr):
    """Elements of a token's key or value of one kv head, those of its scale included."""
    return HEAD_DIM if FORM == PLAIN else HEAD_DIM + 4


@triton.jit
def scale_place(head, offset, HEAD_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr):
    """Index, in a cache as float32, of the scale of token `offset` of a block's kv head; `head`: block * kv heads + kv head."""
    return head * (BLOCK_SIZE * HEAD_DIM // 4 + BLOCK_SIZE) + BLOCK_SIZE * HEAD_DIM // 4 + offset


@triton.jit
def floats_of(stored, FORM: tl.constexpr, kind: tl.constexpr):
    """Stored numbers as `kind`, exactly; numbers with scales are smaller by `range_of`, so that float16 has room."""
    if FORM == FLOAT8:
        wide = stored.to(tl.uint16)
        return (((wide & 0x80) << 8) | ((wide & 0x7F) << 7)).to(tl.float16, bitcast=True).to(kind)
    if FORM == INT8:
        return (stored.to(tl.float32) * 0.0078125).to(kind)
    return stored.to(kind)


@triton.jit
def range_of(FORM: tl.constexpr):
    """See `floats_of`."""
    return 256.0 if FORM == FLOAT8 else 128.0


@triton.jit
def scales_for(largest, FORM: tl.constexpr):
    """Of each head: its scale, and the factor of its elements. `largest`: int32 bits of its largest magnitude."""
    most = 448.0 if FORM == FLOAT8 else 127.0
    is_finite = largest < _NOT_FINITE
    size = largest.to(tl.float32, bitcast=True)
    is_used = is_finite & (size > _LEAST)
    size = tl.where(is_used, size, 1.0)
    scale = tl.where(is_used, tl.div_rn(size, size * 0.0 + most), tl.where(is_finite, 0.0, float("nan")))
    return scale, tl.where(is_used, tl.div_rn(size * 0.0 + most, size), 0.0)


@triton.jit
def magnitudes(x):
    """int32 bits of each magnitude: they compare as the numbers do, and those that are not finite are largest."""
    return x.to(tl.int32, bitcast=True) & _SIGN


@triton.jit
def numbers_of(x, factor, FORM: tl.constexpr, kind: tl.constexpr):
    """x as `kind`; with scales: the numbers nearest to x * factor in float32, ties to even, zeros where the factor is 0."""
    if FORM == PLAIN:
        made = x.to(kind)
    elif FORM == INT8:  # adding rounds to a whole number
        wide = tl.where(factor == 0.0, 0.0, x.to(tl.float32))
        made = ((wide * factor + 12582912.0).to(tl.int32, bitcast=True) - 0x4B400000).to(tl.int8)
    else:
        wide = tl.where(factor == 0.0, 0.0, x.to(tl.float32))
        bits = (wide * factor).to(tl.int32, bitcast=True)
        size = bits & _SIGN
        normal = ((size + 0x7FFFF + ((size >> 20) & 1)) >> 20) - 960
        small = (size.to(tl.float32, bitcast=True) + 16384.0).to(
            tl.int32, bitcast=True
        ) - 0x46800000  # multiples of 2^-9
        made = (tl.where(size < 0x3C800000, small, normal) | ((bits >> 24) & 0x80)).to(tl.uint8)
    return made


def form_of(dtype: torch.dtype) -> int:
    """The form of a cache of this dtype."""
    return _FORMS.get(dtype, 0)


def numbers_and_scales(cache: torch.Tensor, shape: CacheShape) -> tuple[torch.Tensor, torch.Tensor]:
    """A layer's cache [2, blocks, block elements] as kernels take it, and as float32; itself twice if it has no scales.

    Raises ValueError for a shape with scales that would not be aligned.
    """
    if cache.dtype not in SCALED_MOST:
        return cache, cache
    if shape.block_size * shape.head_dim % 4:
        raise ValueError(
            f"block_size {shape.block_size} x head_dim {shape.head_dim} is no multiple of 4, which a cache with scales needs"
        )
    return cache.view(torch.int8 if cache.dtype == torch.int8 else torch.uint8), cache.view(torch.float32)
