"""The seam of whole decoders: weights packed once, and lists of operators that take packed rows through all layers at once.

A backend has it or not (`KernelBackend.decoder`). No models here: who matches a model's modules writes the operators.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Literal, Protocol

import torch

from paged_kernels.backend import AttentionBatch, AttentionRule, CacheShape

Activation = Literal["silu", "gelu_tanh"]
Stored = Literal["plain", "int8"]
"""What packed weights are kept as: their own dtype, or whole numbers of 8 bits with a scale for each column."""


class Rows(IntEnum):
    """What operators read and write: tensors [T, width] of the model's dtype."""

    STREAM = 0
    """The residual stream; the program's input and result."""
    NORMED = 1
    HEADS = 2
    """Queries, keys and values side by side."""
    ATTENDED = 3
    GATED = 4


@dataclass(frozen=True, slots=True)
class PackedWeights:
    """Weights of a linear map in a backend's own order. `bias` [columns] of the same dtype, or None; `data`: uint8.

    `dtype`: of the rows that they are multiplied with. `scales`: float32 [columns], each column's largest magnitude / 127, where
    `stored` is "int8"; else None.
    """

    columns: int
    depth: int
    dtype: torch.dtype
    data: torch.Tensor
    bias: torch.Tensor | None = None
    scales: torch.Tensor | None = None

    @property
    def stored(self) -> Stored:
        """What its numbers are kept as."""
        return "plain" if self.scales is None else "int8"

    @property
    def num_bytes(self) -> int:
        """Of weights, scales and bias."""
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
    """target = activation(source @ gate) * (source @ up); both are stored alike."""

    source: Rows
    target: Rows
    gate: PackedWeights
    up: PackedWeights
    activation: Activation


@dataclass(frozen=True, slots=True)
class HeadNorm:
    """Norms of each query and key before they are turned; weights [head_dim]."""

    queries: torch.Tensor
    keys: torch.Tensor
    eps: float
    one_plus: bool


@dataclass(frozen=True, slots=True)
class Place:
    """HEADS turned to their positions in place, keys and values written to their slots in the cache of `layer`.

    `cosines`, `sines`: [positions, elements turned], of the model's dtype, or None: nothing is turned.
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


Operator = Norm | Linear | Gated | Place | Attend


@dataclass(frozen=True, slots=True)
class Program:
    """Operators in order, and what they work on: `widths` of the rows, heads of a query, shape of a block, dtype of rows."""

    operators: Sequence[Operator]
    widths: Mapping[Rows, int]
    num_heads: int
    shape: CacheShape
    dtype: torch.dtype


class PreparedProgram(Protocol):
    """A program that can be run, with room of its own."""

    def run(self, stream: torch.Tensor, batch: AttentionBatch, pool: torch.Tensor) -> None:
        """Takes `stream` [T, width], contiguous, through the operators, in place. `pool`: [layers, 2, blocks, block elements]."""
        ...


class DecoderKernels(Protocol):
    """Products with packed weights, and programs. A row's bits depend on nothing but the row."""

    def packs(self, dtype: torch.dtype, depth: int, stored: Stored = "plain") -> bool:
        """Whether such weights can be packed."""
        ...

    def pack(self, weight: torch.Tensor, bias: torch.Tensor | None, *, stored: Stored = "plain") -> PackedWeights:
        """Packs `weight` [columns, depth]; nothing of it is referred to afterwards.

        "int8": each column's weights are rounded to multiples of its largest magnitude / 127 (ties to even). Products are those of
        the multiples, exact in either dtype, times the scale; a column with a weight that is not finite gives NaN.
        """
        ...

    def linear(self, rows: torch.Tensor, weights: PackedWeights, *, wide: bool = False) -> torch.Tensor:
        """rows [..., depth] @ weights + bias: [..., columns] of the rows' dtype, or float32 with the same values when `wide`."""
        ...

    def runs(self, dtype: torch.dtype, cache_dtype: torch.dtype) -> bool:
        """Whether programs with rows and caches of these can be prepared."""
        ...

    def prepare(self, program: Program, cache_dtype: torch.dtype) -> PreparedProgram:
        """Makes it ready to run."""
        ...
