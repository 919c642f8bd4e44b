"""Interface of whole decoders: packed weights, and operator lists that take packed rows through all layers at once.

Optional for a backend (`registry.decoder_kernels`). Independent of models: callers match a model's modules
and write the operators.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Literal, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from paged_kernels.backend import AttentionBatch, AttentionRule, CacheShape
from paged_kernels.quantized import QuantizedWeight
from paged_kernels.ranks import RankSums

Activation = Literal["silu", "gelu_tanh"]
Stored = Literal["plain", "int8", "int4", "fp8"]
"""How packed weights are stored: in their own dtype, or as integers or E4M3 numbers with scales."""


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
class PackedForm:
    """How weights are packed: plain, or as numbers in groups of `group` depths, see `QuantizedWeight`.

    `half`: scales and offsets are kept in float16, which changes none of them.
    """

    stored: Stored = "plain"
    group: int = 0
    has_offsets: bool = False
    half: bool = False


@dataclass(frozen=True, slots=True)
class PackedWeights:
    """Weights of a linear map in a backend's own order.

    `data`: uint8. `dtype`: of the rows they are multiplied with. `bias` [columns] of the same dtype, or None.
    """

    columns: int
    depth: int
    dtype: torch.dtype
    data: torch.Tensor
    bias: torch.Tensor | None = None
    form: PackedForm = PackedForm()

    @property
    def num_bytes(self) -> int:
        """Bytes of weights and bias."""
        return self.data.nbytes + (0 if self.bias is None else self.bias.nbytes)


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
    """target = activation(source @ gate) * (source @ up); both are packed in the same form."""

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


@dataclass(frozen=True, slots=True)
class Embed:
    """STREAM = rows of `table` [vocab, width], by token id, times `scale`, rounded once. First in a decode program."""

    table: torch.Tensor
    scale: float


@dataclass(frozen=True, slots=True)
class Head:
    """Logits of STREAM: float32, with the values of the rows' dtype.

    The weights are of the columns from `begin` on, of `width` in all (None = those of the weights).
    """

    weights: PackedWeights
    begin: int = 0
    width: int | None = None


@dataclass(frozen=True, slots=True)
class Gather:
    """Logits of all ranks, each of which has computed `columns` of them."""

    columns: int
    sums: RankSums


@dataclass(frozen=True, slots=True)
class Choose:
    """The next token ids: the first of each row's highest logits [vocab_size]. Last in a decode program."""

    vocab_size: int


@dataclass(frozen=True, slots=True)
class Reduce:
    """target (+)= sum of all ranks' source, rounded once, in rank order. All ranks run equal lists on equally many rows.

    `sums`: with `in_programs`. Widths of source and target are equal.
    """

    source: Rows
    target: Rows
    sums: RankSums
    adds: bool = False


Operator = Norm | Linear | Gated | RotateAndStore | Attend | Embed | Head | Gather | Choose | Reduce


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


@dataclass(frozen=True, slots=True)
class DecodeRows:
    """n rows that decode, as contiguous arrays on the host which each step changes.

    `token_ids`, `positions`: int32 [n], the token that the next step computes, and its position. `sequences`:
    int32 [n], the row of `block_tables` int32 [S, most blocks]; both stay as they are.
    """

    token_ids: NDArray[np.int32]
    positions: NDArray[np.int32]
    sequences: NDArray[np.int32]
    block_tables: NDArray[np.int32]


class DecodeRun(Protocol):
    """Steps of the same rows. `logits` float32 [n, vocab], `finite` bool [n]: of the last step."""

    @property
    def logits(self) -> torch.Tensor:
        """See the class."""
        ...

    @property
    def finite(self) -> NDArray[np.bool_]:
        """See the class. The chosen token of a row that is not finite is some token."""
        ...

    def step(self) -> bool:
        """Compute one token of each row, replace it by the one chosen, and move positions on by one.

        All positions must be within their rows' blocks. True if all rows are finite.
        """
        ...


class DecodeProgram(Protocol):
    """A program from token ids to the next token ids."""

    def begin(self, rows: DecodeRows, pool: torch.Tensor) -> DecodeRun:
        """Prepare steps of `rows` over the cache `pool`."""
        ...


class FixedSteps(Protocol):
    """Decode steps in memory at fixed addresses, so that a device can record the launches of one and repeat them.

    A step has as many rows as the memory, or fewer; each row is the next token of a sequence. All work is in the order
    of the device's current stream, and none of it waits for the device.
    """

    def take(self, token_ids: torch.Tensor, batch: AttentionBatch, num_rows: int) -> None:
        """Copy a step, on the device, to the first rows; those up to `num_rows` become padding, which writes nowhere."""
        ...

    def run(self, num_rows: int) -> None:
        """Compute the first `num_rows` rows. What is launched depends on `num_rows` alone."""
        ...

    def logits(self, num_rows: int) -> torch.Tensor:
        """float32 [num_rows, vocab] of the last `run`, with the values of the rows' dtype. The next one overwrites them."""
        ...


class DecoderKernels(Protocol):
    """Products with packed weights, and programs.

    `keeps_row_bits`: a row's bits depend only on the row, and not on how many there are.
    """

    keeps_row_bits: bool

    def packs(self, dtype: torch.dtype, depth: int) -> bool:
        """True if plain weights of this dtype and depth can be packed."""
        ...

    def packs_quantized(self, dtype: torch.dtype, numbers: torch.dtype) -> bool:
        """True if weights with `numbers` of this dtype, int8 or float8_e4m3fn, can be packed, for rows of `dtype`."""
        ...

    def pack(self, weight: torch.Tensor | QuantizedWeight, bias: torch.Tensor | None) -> PackedWeights:
        """Pack weights of [columns, depth], which the caller gives up: their memory may become the packed weights'.

        Products with integers round each group of a row to multiples of its largest magnitude / 127
        (ties to even), and sum products of integers exactly. So a result is off by at most half a multiple
        times the sum of the group's weights' magnitudes, over all groups. Products with E4M3 numbers do not round rows.
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

    def prepare_decode(self, program: Program, cache_dtype: torch.dtype) -> DecodeProgram | None:
        """Convert a program that begins with `Embed` and ends with `Head` and `Choose`; None if rows are not on the host."""
        ...

    def fixed_steps(self, program: Program, num_rows: int, width: int, pool: torch.Tensor) -> FixedSteps | None:
        """Memory for steps of up to `num_rows` rows over up to `width` blocks each, and a program from `Embed` to `Head`.

        `pool`: the cache, on the rows' device. None if rows are on the host, where nothing is launched.
        """
        ...
