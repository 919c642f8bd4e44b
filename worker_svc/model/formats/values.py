"""What the numbers of a quantized matrix stand for: numbers with scales and offsets, exactly, or dequantized weights."""

from collections.abc import Callable, Mapping

import torch

from paged_kernels.quantized import MOST_FLOAT8_SCALE, QuantizedWeight
from worker_svc.model.formats.form_checks import grid_of
from worker_svc.model.formats.forms import Layout, Matrix, UnsupportedWeights

Tensors = Mapping[str, torch.Tensor]
"""Of a matrix, by suffix."""
_AWQ_ORDER = [0, 4, 1, 5, 2, 6, 3, 7]
"""Place in a word of each of eight columns."""
_FP4 = [0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12]
"""Numbers that four bits stand for, times two."""
_ONES = {4: 0x11111111, 8: 0x01010101}
"""A word with 1 in each number."""


def value_of(matrix: Matrix, tensors: Tensors, dtype: torch.dtype) -> torch.Tensor | QuantizedWeight:
    """The weights [..., columns, depth], for rows of `dtype`.

    Numbers are kept: a weight is scale * (number - zero point), which is exact. Where `QuantizedWeight` or the kernels
    lack such weights (`why_dequantized`), they are dequantized: computed in float32, then rounded to `dtype`.
    Raises UnsupportedWeights for tensors that contradict each other.
    """
    numbers, scales, zeros = _READERS[matrix.form.layout](matrix, tensors)
    if why_dequantized(matrix, tensors):
        return _dequantized(numbers, scales, zeros, matrix, _order(matrix, tensors)).to(dtype)
    return _kept(numbers, scales, zeros, matrix, dtype)


def why_dequantized(matrix: Matrix, tensors: Tensors) -> str:
    """Why a matrix is not kept as it is stored; empty if it is."""
    if len(matrix.shape) > 2:
        return "merged experts"
    if _order(matrix, tensors) is not None:
        return "groups in the order of activations (g_idx)"
    if matrix.form.layout.is_float and _largest_scale(matrix, tensors) >= MOST_FLOAT8_SCALE:
        return f"FP8 with scales of {MOST_FLOAT8_SCALE:g} or more"
    return "" if matrix.form.kept_group else f"groups of {matrix.form.block[1]}"


def _largest_scale(matrix: Matrix, tensors: Tensors) -> float:
    return float(_on_grid(tensors[matrix.form.layout.scales], matrix).abs().max())


# --- stored numbers as [columns, depth], scales and zero points as [columns or 1, groups] --------------------------------

Read = tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]
"""Numbers, int8 or E4M3; scales and zero points in float32."""


def _bytes(matrix: Matrix, tensors: Tensors) -> Read:
    zeros = tensors.get("_zero_point")
    return tensors[""], _on_grid(tensors["_scale"], matrix), None if zeros is None else _on_grid(zeros, matrix)


def _words(matrix: Matrix, tensors: Tensors) -> Read:
    bits, packed, zeros = matrix.form.bits, tensors["_packed"], tensors.get("_zero_point")
    columns, depth = (int(size) for size in tensors["_shape"])
    if columns != packed.shape[0] or -(-depth * bits // 32) != packed.shape[1]:
        raise UnsupportedWeights(
            f"says in {matrix.stem}_shape that {matrix.target} is {columns} x {depth}, which it is not"
        )
    if zeros is not None and zeros.dtype == torch.int32:
        zeros = _signed(zeros.T, bits)[:, :columns].T
    factors = None if zeros is None else _on_grid(zeros, matrix)
    return _signed(packed, bits)[:, :depth].contiguous(), _on_grid(tensors["_scale"], matrix), factors


def _gptq(matrix: Matrix, tensors: Tensors) -> Read:
    bits, zeros = matrix.form.bits, tensors["qzeros"]
    if matrix.form.layout is Layout.GPTQ:
        zeros = zeros + _ONES[bits]  # a zero point of 0 was borrowed from the number above
    return _signed(tensors["qweight"].T, bits), tensors["scales"].T.float(), _signed(zeros, bits).T.float()


def _awq(matrix: Matrix, tensors: Tensors) -> Read:
    bits = matrix.form.bits
    numbers, zeros = (
        _signed(tensors[name], bits).unflatten(1, (-1, 8))[:, :, _AWQ_ORDER] for name in ("qweight", "qzeros")
    )
    return numbers.flatten(1).T.contiguous(), tensors["scales"].T.float(), zeros.flatten(1).T.float()


def _fp4(matrix: Matrix, tensors: Tensors) -> Read:
    halves = tensors["_packed"]
    numbers = torch.tensor(_FP4, dtype=torch.int8)[torch.stack([halves & 15, halves >> 4], -1).flatten(1).int()]
    scales = _on_grid(tensors["_scale"], matrix) / 2
    return numbers, scales / tensors["_global_scale"] if "_global_scale" in tensors else scales, None


def _fp8(matrix: Matrix, tensors: Tensors) -> Read:
    layout = matrix.form.layout
    return tensors[layout.numbers], _on_grid(tensors[layout.scales], matrix), None


_READERS: dict[Layout, Callable[[Matrix, Tensors], Read]] = {
    Layout.FP8: _fp8,
    Layout.FP8_BLOCKS: _fp8,
    Layout.BYTES: _bytes,
    Layout.WORDS: _words,
    Layout.MXFP4: _fp4,
    Layout.NVFP4: _fp4,
    Layout.GPTQ: _gptq,
    Layout.GPTQ_V2: _gptq,
    Layout.AWQ: _awq,
}


def _signed(words: torch.Tensor, bits: int) -> torch.Tensor:
    """int32 words [n, w] to int8 [n, w * 32 / bits]: numbers without a sign, less half of their range."""
    data = words.contiguous().view(torch.uint8)
    if bits == 8:
        return (data ^ 0x80).view(torch.int8)
    return torch.stack([data & 15, data >> 4], -1).flatten(1).view(torch.int8) - 8


def _on_grid(factors: torch.Tensor, matrix: Matrix) -> torch.Tensor:
    """Factors as float32 [..., blocks of columns, blocks of depths]. Bytes are exponents of two."""
    if factors.dtype == torch.uint8:
        factors = factors.view(torch.float8_e8m0fnu)
    return factors.float().reshape(*matrix.shape[:-2], *grid_of(matrix))


# --- weights --------------------------------------------------------------------------------------------------------------


def _kept(
    numbers: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor | None, matrix: Matrix, dtype: torch.dtype
) -> QuantizedWeight:
    (columns, depth), form = numbers.shape, matrix.form
    scales = _kept_factors(scales, matrix, columns, depth)
    offsets = None
    if zeros is not None and zeros.any():
        low = 8 if form.bits == 4 else 0  # with offsets, 4 bits are from 0 to 15
        numbers, offsets = numbers + low, -scales * (_kept_factors(zeros, matrix, columns, depth) + low)
    return QuantizedWeight(numbers.contiguous(), scales, offsets, form.kept_bits, form.kept_group, dtype)


def _kept_factors(factors: torch.Tensor, matrix: Matrix, columns: int, depth: int) -> torch.Tensor:
    """Factors of blocks as [columns, groups]: one for each column and kept group."""
    (rows, group), kept = matrix.form.block, matrix.form.kept_group
    factors = factors.repeat_interleave((group or depth + kept) // kept, 1)[:, : -(-depth // kept)]
    return factors.repeat_interleave(rows or columns, 0)[:columns].contiguous()


def _dequantized(
    numbers: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor | None, matrix: Matrix, order: torch.Tensor | None
) -> torch.Tensor:
    """`order`: group of each depth, None = one after the other."""

    def spread(factors: torch.Tensor) -> torch.Tensor:
        return _spread(factors, matrix.form.block, numbers.shape) if order is None else factors[:, order]

    values = numbers.float() if zeros is None else numbers.float() - spread(zeros)
    return values * spread(scales)


def _spread(factors: torch.Tensor, block: tuple[int, int], shape: tuple[int, ...]) -> torch.Tensor:
    """Factors of blocks as one for each weight."""
    columns, depth = shape[-2:]
    factors = factors.repeat_interleave(block[1] or depth, -1)[..., :depth]
    return factors.repeat_interleave(block[0] or columns, -2)[..., :columns, :]


def _order(matrix: Matrix, tensors: Tensors) -> torch.Tensor | None:
    """Group of each depth, unless they follow one another."""
    order = tensors.get("g_idx", tensors.get("_g_idx"))
    if order is None or bool((order == -1).all()):
        return None
    groups = grid_of(matrix)[1]
    if int(order.min()) < 0 or int(order.max()) >= groups:
        raise UnsupportedWeights(f"has numbers in g_idx of {matrix.target} that are not from 0 to {groups - 1}")
    depth = len(order)
    plain = torch.arange(depth) // (matrix.form.block[1] or depth)
    return None if torch.equal(order.long(), plain) else order.long()
