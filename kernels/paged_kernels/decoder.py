"""Interface of whole decoders: packed weights, and operator lists that take packed rows through all layers at once.

Optional for a backend (`registry.decoder_kernels`). Independent of models: callers match a model's modules
and write the operators.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Literal, Protocol

import torch

from paged_kernels.backend import AttentionBatch, AttentionRule, CacheShape

Activation = Literal["silu", "gelu_tanh"]
Stored = Literal["plain", "int8"]
"""Storage form of packed weights: their own dtype, or 8-bit integers with a scale per column."""


class Rows(IntEnum):
    """Buffers that operators read and write: tensors [T, width] of the model's dtype."""

    STREAM = 0
    """The residual stream: the program's input and result."""
    NORMED = 1
    HEADS = 2
    """Queries, keys and values side by side."""
    ATTENDED = 3
    GATED = 4


@dataclass(frozen=True, slots=True)
class PackedWeights:
    """Weights of a linear map in a backend's own order.

    `bias` [columns] of the same dtype, or None; `data`: uint8.

    `dtype`: of the rows they are multiplied with. `scales`: float32 [columns], each column's largest
    magnitude / 127, if `stored` is "int8"; else None.
    """

    columns: int
    depth: int
    dtype: torch.dtype
    data: torch.Tensor
    bias: torch.Tensor | None = None
    scales: torch.Tensor | None = None

    @property
    def stored(self) -> Stored:
        """Storage form of the weights."""
        return "plain" if self.scales is None else "int8"

    @property
    def num_bytes(self) -> int:
        """Bytes of weights, scales and bias."""
        return sum(tensor.nbytes for tensor in (self.data, self.scales, self.bias) if tensor is not None)


@dataclass(frozen=True, slots=True)
class Norm:
    """target (+)= source / sqrt(mean(source^2) + eps) * weight, or * (1 + weight)."""

    source: Rows
    target: Rows
    weight: torch.Tensor
    eps: float
    one_plus: bool = False
    adds: bool = False


@dataclass(frozen=True, slots=True)
class Linear:
    """target (+)= source @ weights + bias."""

    source: Rows
    target: Rows
    weights: PackedWeights
    adds: bool = False


@dataclass(frozen=True, slots=True)
class Gated:
    """target = activation(source @ gate) * (source @ up); both have the same storage form."""

    source: Rows
    target: Rows
    gate: PackedWeights
    up: PackedWeights
    activation: Activation


@dataclass(frozen=True, slots=True)
class HeadNorm:
    """Norms of each query and key before rotation; weights [head_dim]."""

    queries: torch.Tensor
    keys: torch.Tensor
    eps: float
    one_plus: bool


@dataclass(frozen=True, slots=True)
class RotateAndStore:
    """Rotate HEADS to their positions in place, and write keys and values to their slots in the cache of `layer`.

    `cosines`, `sines`: [positions, rotated elements], of the model's dtype, or None for no rotation.
    """

    layer: int
    cosines: torch.Tensor | None
    sines: torch.Tensor | None
    norm: HeadNorm | None = None


@dataclass(frozen=True, slots=True)
class Attend:
    """ATTENDED = attention of HEADS' queries over the cache of `layer`."""

    layer: int
    rule: AttentionRule


Operator = Norm | Linear | Gated | RotateAndStore | Attend


@dataclass(frozen=True, slots=True)
class Program:
    """Operators in order, with `widths` of the row buffers, query heads, block shape and dtype of rows."""

    operators: Sequence[Operator]
    widths: Mapping[Rows, int]
    num_heads: int
    shape: CacheShape
    dtype: torch.dtype


class PreparedProgram(Protocol):
    """A program that can be run; owns its buffers."""

    def run(self, stream: torch.Tensor, batch: AttentionBatch, pool: torch.Tensor) -> None:
        """Run the operators on `stream` [T, width], contiguous, in place. `pool`: [layers, 2, blocks, block elements]."""
        ...


class DecoderKernels(Protocol):
    """Products with packed weights, and programs. A row's bits depend only on the row."""

    def packs(self, dtype: torch.dtype, depth: int, stored: Stored = "plain") -> bool:
        """True if such weights can be packed."""
        ...

    def pack(self, weight: torch.Tensor, bias: torch.Tensor | None, *, stored: Stored = "plain") -> PackedWeights:
        """Pack `weight` [columns, depth]; no reference to it is kept.

        "int8": each column's weights are rounded to multiples of its largest magnitude / 127 (ties to even).
        Products are computed with the multiples, exact in either dtype, then scaled; a column with a
        non-finite weight gives NaN.
        """
        ...

    def linear(self, rows: torch.Tensor, weights: PackedWeights, *, wide: bool = False) -> torch.Tensor:
        """rows [..., depth] @ weights + bias: [..., columns] of the rows' dtype.

        `wide`: as float32, with the same values.
        """
        ...

    def runs(self, dtype: torch.dtype, cache_dtype: torch.dtype) -> bool:
        """True if programs with these row and cache dtypes can be prepared."""
        ...

    def prepare(self, program: Program, cache_dtype: torch.dtype) -> PreparedProgram:
        """Convert the program to a runnable form."""
        ...
