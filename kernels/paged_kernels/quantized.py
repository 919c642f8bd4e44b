"""Quantized weights: the one form that every reader of quantized checkpoints, and `--quantization`, produces."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch.nn import functional

FLOAT8 = torch.float8_e4m3fn
_MOST = {8: 127, 4: 8}
MOST_FLOAT8_SCALE = 256.0
"""Scales of E4M3 weights are smaller: kernels multiply them with a large power of two."""
_PIECE = 2**22
"""Weights that are rounded at once."""
_LEAST_HALF = 2.0**-16
"""Smallest scale that float16 rounds by less than a 500th, so that 127 times it is off by less than half of it."""


@dataclass(frozen=True, slots=True)
class QuantizedWeight:
    """Weights [columns, depth] of a linear map as numbers with factors for each `group` of depths of a column.

    A weight is scale * number + offset. `numbers`: [columns, depth], int8, of 8 bits from -128 to 127, of 4
    bits from -8 to 7, or with offsets from 0 to 15; or float8_e4m3fn, without offsets. `scales`, `offsets`: float32
    [columns, groups], `offsets` None = all zero; the last group of a column may be shorter. `dtype`: of the rows
    that they are multiplied with, and of `dequantized()`.
    """

    numbers: torch.Tensor
    scales: torch.Tensor
    offsets: torch.Tensor | None
    bits: int
    group: int
    dtype: torch.dtype

    @property
    def is_float(self) -> bool:
        """True if the numbers are float8_e4m3fn."""
        return self.numbers.dtype == FLOAT8

    @property
    def columns(self) -> int:
        """Number of columns: outputs of the linear map."""
        return self.numbers.shape[0]

    @property
    def depth(self) -> int:
        """Number of depths: inputs of the linear map."""
        return self.numbers.shape[1]

    def dequantized(self) -> torch.Tensor:
        """The weights [columns, depth] that the numbers stand for: computed in float32, then rounded to `dtype`."""
        values = self.numbers.float() * self._spread(self.scales)
        if self.offsets is not None:
            values += self._spread(self.offsets)
        return values.to(self.dtype)

    def to(self, device: torch.device) -> "QuantizedWeight":
        """The same on a device."""
        offsets = None if self.offsets is None else self.offsets.to(device)
        return replace(self, numbers=self.numbers.to(device), scales=self.scales.to(device), offsets=offsets)

    def rows(self, order: torch.Tensor) -> "QuantizedWeight":
        """The columns with these indexes, in this order."""
        offsets = None if self.offsets is None else self.offsets[order]
        return replace(self, numbers=self.numbers[order], scales=self.scales[order], offsets=offsets)

    def _spread(self, factors: torch.Tensor) -> torch.Tensor:
        """Factors of groups as one for each depth."""
        return factors.repeat_interleave(self.group, 1)[:, : self.depth]


def quantized(weight: torch.Tensor, bits: int, group: int) -> QuantizedWeight:
    """Round `weight` [columns, depth] to integers of 8 or 4 bits with a scale for each `group` of depths, as Q8_0 and Q4_0 do.

    8 bits: the largest magnitude of a group becomes 127, and each weight is within half a scale. 4 bits: the
    largest magnitude becomes -8, and each weight is within half a scale, or one at the end with the other
    sign. Scales are rounded to float16 first, unless that has no such number. A group with a number that is
    not finite gets the scale NaN.
    """
    depth = weight.shape[1]
    # In pieces: intermediate results of a large head would take ten times its memory.
    pieces = weight.split(max(1, _PIECE // depth))
    ends = [torch.aminmax(_grouped(piece, group), dim=2) for piece in pieces]
    scales = _scales(*(torch.cat(side) for side in zip(*ends, strict=True)), bits)
    factors = torch.where(scales == 0, 0.0, 1 / scales)
    numbers = torch.empty(weight.shape, dtype=torch.int8)
    for piece, factor, to in zip(*(whole.split(len(pieces[0])) for whole in (weight, factors, numbers)), strict=True):
        rounded = torch.round(_grouped(piece, group) * factor[:, :, None])
        rounded = rounded.clamp_(-_MOST[bits], 127 if bits == 8 else 7).nan_to_num_(0)
        to.copy_(rounded.view(len(piece), -1)[:, :depth])
    return QuantizedWeight(numbers, scales, None, bits, group, weight.dtype)


def _grouped(weight: torch.Tensor, group: int) -> torch.Tensor:
    """Weights as float32 [columns, groups, group], the last group filled with zeros."""
    columns, depth = weight.shape
    num_groups = -(-depth // group)
    return functional.pad(weight.float(), (0, num_groups * group - depth)).view(columns, num_groups, group)


def _scales(low: torch.Tensor, high: torch.Tensor, bits: int) -> torch.Tensor:
    largest = torch.maximum(-low, high) if bits == 8 else -torch.where(-low >= high, low, high)
    scales = largest / _MOST[bits]
    halved, is_finite = scales.half().float(), torch.isfinite(low) & torch.isfinite(high)
    fits = halved.isfinite() & (halved.abs() >= _LEAST_HALF) | (scales == 0) | ~is_finite
    return torch.where(is_finite, halved if fits.all() else scales, torch.nan)


def joined(parts: Sequence[torch.Tensor | QuantizedWeight]) -> torch.Tensor | QuantizedWeight:
    """Weights that read the same rows as one, side by side. Exact.

    Integers of different forms get 8 bits and the smallest of their groups, E4M3 numbers the smallest of their groups.
    Beside each other and beside unquantized weights they are dequantized.
    """
    quantized_parts = [part for part in parts if isinstance(part, QuantizedWeight)]
    if len(quantized_parts) < len(parts) or len({part.is_float for part in quantized_parts}) > 1:
        return torch.cat([dense(part) for part in parts])
    return _concatenated(_alike(quantized_parts))


def without_nan(weight: QuantizedWeight) -> torch.Tensor:
    """The scales, NaN for groups with a number that is NaN: so kernels need not know E4M3's NaN."""
    if not weight.is_float or not bool(weight.numbers.isnan().any()):
        return weight.scales
    bad = _grouped(weight.numbers, weight.group).isnan().any(2)
    return weight.scales.masked_fill(bad, torch.nan)


def dense(weight: torch.Tensor | QuantizedWeight) -> torch.Tensor:
    """The weights themselves, dequantized if need be."""
    return weight.dequantized() if isinstance(weight, QuantizedWeight) else weight


def _alike(parts: list[QuantizedWeight]) -> list[QuantizedWeight]:
    if len({(part.bits, part.group, part.offsets is None) for part in parts}) == 1:
        return parts
    group = min(part.group for part in parts)
    if any(part.group % group for part in parts):
        raise ValueError(f"groups of {sorted({part.group for part in parts})} depths have no common divisor among them")
    has_offsets = any(part.offsets is not None for part in parts)
    return [_as_bytes(part, group, has_offsets=has_offsets) for part in parts]


def _as_bytes(part: QuantizedWeight, group: int, *, has_offsets: bool) -> QuantizedWeight:
    """The same weights in 8 bits and smaller groups."""
    num_groups = -(-part.depth // group)

    def smaller(factors: torch.Tensor) -> torch.Tensor:
        return factors.repeat_interleave(part.group // group, 1)[:, :num_groups].contiguous()

    offsets = torch.zeros_like(part.scales) if part.offsets is None else part.offsets
    kept = smaller(offsets) if has_offsets else None
    return replace(part, scales=smaller(part.scales), offsets=kept, bits=8, group=group)


def _concatenated(parts: list[QuantizedWeight]) -> QuantizedWeight:
    offsets = [part.offsets for part in parts if part.offsets is not None]
    return replace(
        parts[0],
        numbers=torch.cat([part.numbers for part in parts]),
        scales=torch.cat([part.scales for part in parts]),
        offsets=torch.cat(offsets) if offsets else None,
    )
