"""Products of rows with packed weights on a GPU: plain ones by torch (cuBLAS), E4M3 ones in Triton.

E4M3 weights are read as bytes, by any GPU, and multiplied with rows as they are: a group's products are summed in float32,
then multiplied with its scale. A column is its scales, float32, then its numbers, both filled up to 16 bytes.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch.nn import functional

from paged_kernels.gpu.scaled_cache import FLOAT8, floats_of, range_of
from paged_kernels.program import PackedForm, PackedWeights
from paged_kernels.quantized import QuantizedWeight, without_nan

_ALIGNMENT = 16


@triton.jit
def float8_kernel(
    rows, weights, scales, bias, out, num_rows, columns,
    DEPTH: tl.constexpr, STRIDE: tl.constexpr, HEAD: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr, HAS_BIAS: tl.constexpr, ADDS: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """Program (piece of columns, piece of rows): `out` [rows, columns] (+)= rows [rows, DEPTH] @ weights + bias.

    `weights`: bytes, STRIDE from column to column, of which HEAD are scales; `scales`: the same memory as float32.
    """
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    in_group = tl.arange(0, GROUP)
    is_column, is_row = column < columns, row < num_rows
    row_at = rows + row.to(tl.int64)[:, None] * DEPTH + in_group[None, :]
    numbers_at = weights + (column.to(tl.int64) * STRIDE)[None, :] + HEAD + in_group[:, None]
    scale_at = scales + column.to(tl.int64) * (STRIDE // 4)
    acc = tl.zeros([ROWS, COLUMNS], tl.float32)
    for begin in range(0, DEPTH, GROUP):
        held = begin + in_group < DEPTH
        x = tl.load(row_at + begin, mask=is_row[:, None] & held[None, :], other=0.0)
        number = tl.load(numbers_at + begin, mask=is_column[None, :] & held[:, None], other=0)
        scale = tl.load(scale_at + begin // GROUP, mask=is_column, other=0.0) * range_of(FLOAT8)
        if UPCAST:
            made = tl.dot(x.to(tl.float32), floats_of(number, FLOAT8, tl.float32), input_precision="ieee")
        else:
            made = tl.dot(x, floats_of(number, FLOAT8, x.dtype), input_precision="ieee")
        acc += made * scale[None, :]
    if HAS_BIAS:
        acc += tl.load(bias + column, mask=is_column, other=0.0).to(tl.float32)[None, :]
    held = is_row[:, None] & is_column[None, :]
    to = out + row.to(tl.int64)[:, None] * columns + column[None, :]
    if ADDS:
        acc += tl.load(to, mask=held, other=0.0).to(tl.float32)
    tl.store(to, acc.to(out.dtype.element_ty), mask=held)


@dataclass(frozen=True, slots=True)
class _Tile:
    """Rows and columns of a program, and how it is compiled."""

    rows: int
    columns: int
    num_warps: int
    num_stages: int


_TILES = (_Tile(16, 32, 4, 6), _Tile(64, 64, 4, 3), _Tile(128, 64, 4, 2))
"""By their rows: the first that holds all rows, or the last."""


def pack_float8(weight: QuantizedWeight, bias: torch.Tensor | None) -> PackedWeights:
    """E4M3 weights as described above, on their device."""
    columns, scales = weight.columns, without_nan(weight)
    parts = [scales.contiguous().view(torch.uint8), weight.numbers.contiguous().view(torch.uint8)]
    data = torch.cat([functional.pad(part, (0, -part.shape[1] % _ALIGNMENT)) for part in parts], 1)
    form = PackedForm("fp8", weight.group)
    return PackedWeights(
        columns, weight.depth, weight.dtype, data.view(-1), None if bias is None else bias.detach(), form
    )


@dataclass(frozen=True, slots=True)
class Products:
    """Products with packed weights of either form. `upcast`: for the interpreter, which cannot multiply bfloat16."""

    upcast: bool

    def linear(self, rows: torch.Tensor, weights: PackedWeights) -> torch.Tensor:
        """rows [..., depth] @ weights + bias: [..., columns] of their dtype."""
        if weights.form.stored == "plain":
            return functional.linear(rows, _matrix(weights), weights.bias)
        out = rows.new_empty(*rows.shape[:-1], weights.columns)
        flat = rows.reshape(-1, weights.depth)
        self._multiply(flat, weights, out.view(-1, weights.columns), adds=False)
        return out

    def add_linear(self, rows: torch.Tensor, weights: PackedWeights, target: torch.Tensor) -> None:
        """target [T, columns] += rows [T, depth] @ weights + bias."""
        if weights.form.stored == "plain":
            target.addmm_(rows, _matrix(weights).T)
            if weights.bias is not None:
                target += weights.bias
        else:
            self._multiply(rows, weights, target, adds=True)

    def _multiply(self, rows: torch.Tensor, weights: PackedWeights, out: torch.Tensor, *, adds: bool) -> None:
        tile = next((tile for tile in _TILES if len(rows) <= tile.rows), _TILES[-1])
        stride = len(weights.data) // weights.columns
        num_groups, has_bias = triton.cdiv(weights.depth, weights.form.group), weights.bias is not None
        if len(rows):
            float8_kernel[(triton.cdiv(weights.columns, tile.columns), triton.cdiv(len(rows), tile.rows))](
                rows, weights.data, weights.data.view(torch.float32), weights.bias if has_bias else rows, out, len(rows),
                weights.columns, DEPTH=weights.depth, STRIDE=stride,
                HEAD=triton.cdiv(num_groups * 4, _ALIGNMENT) * _ALIGNMENT, GROUP=weights.form.group, ROWS=tile.rows,
                COLUMNS=tile.columns, HAS_BIAS=has_bias, ADDS=adds, UPCAST=self.upcast, num_warps=tile.num_warps,
                num_stages=tile.num_stages, enable_fp_fusion=True,
            )  # fmt: skip


def _matrix(weights: PackedWeights) -> torch.Tensor:
    return weights.data.view(weights.dtype).view(weights.columns, weights.depth)
