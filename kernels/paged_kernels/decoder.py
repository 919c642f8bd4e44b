"""Interface of whole decoders: packed weights, and operator lists that take packed rows through all layers at once.

Optional for a backend (`registry.decoder_kernels`). Independent of models: callers match a model's modules
and write the operators.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Literal, Protocol, runtime_checkable

import numpy as np
import torch
from numpy.typing import NDArray

from paged_kernels.backend import AttentionBatch, AttentionRule, CacheShape
from paged_kernels.quantized import QuantizedWeight
from paged_kernels.ranks import RankSums

Activation = Literal["silu", "gelu_tanh"]
Scoring = Literal["softmax", "sigmoid"]
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
    """Of experts, the rows of all that a row is given to, side by side."""
    PARTS = 5
    """Results of a row's experts, side by side."""
    SHARED = 6
    """Results of an expert that all rows have."""
    SHARED_GATE = 7
    """One element: its sigmoid is the weight of SHARED."""


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

    `cosines`, `sines`: [positions, rotated elements], of the model's dtype, or None for no rotation. `group`: the layer's
    cache group.
    """

    layer: int
    cosines: torch.Tensor | None
    sines: torch.Tensor | None
    norm: HeadNorm | None = None
    group: int = 0


@dataclass(frozen=True, slots=True)
class Attend:
    """ATTENDED = attention of HEADS' queries over the cache of `layer`, which is in the cache group `group`."""

    layer: int
    rule: AttentionRule
    group: int = 0


@dataclass(frozen=True, slots=True)
class Embed:
    """STREAM = rows of `table` [vocab, width], by token id, times `scale`, rounded once. First in a decode program."""

    table: torch.Tensor
    scale: float


@dataclass(frozen=True, slots=True)
class Head:
    """Logits of STREAM: float32, with the values of the rows' dtype.

    The weights are of the columns from `begin` on, of `width` in all (None = those of the weights). `cap`: logits are
    `cap * tanh(logits / cap)`, each operation in the rows' dtype; on a GPU only.
    """

    weights: PackedWeights
    begin: int = 0
    width: int | None = None
    cap: float | None = None


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


@dataclass(frozen=True, slots=True)
class Routing:
    """Which experts a row is given to, from its logits, and their weights in the sum of results.

    Scores are the softmax of the logits, or the sigmoid of each. The `top_k` experts with the highest scores are chosen; their
    scores, divided by the sum of these if `normalised`, times `scale`, are the weights. `bias`: float32 [num_experts], added to
    scores for the choice alone. `groups` > 1: the experts are in that many groups of equal size, and chosen from the
    `kept_groups` with the highest sums of their `best_of_group` highest scores. `exact`: logits are float32, instead of
    rounded to the rows' dtype. `rounds`: the weights are rounded to the rows' dtype, and results times weights too.
    """

    num_experts: int
    top_k: int
    scoring: Scoring
    normalised: bool
    exact: bool
    rounds: bool
    scale: float = 1.0
    bias: torch.Tensor | None = None
    groups: int = 1
    kept_groups: int = 1
    best_of_group: int = 1


@dataclass(frozen=True, slots=True)
class Route:
    """Give each row of `source` to experts. `router`: plain weights, one column for each expert."""

    source: Rows
    router: PackedWeights
    routing: Routing


@dataclass(frozen=True, slots=True)
class ExpertWeights:
    """Weights of `num_experts` gated parts: each expert's gate, then its up projection, in one matrix, and each one's down.

    Columns of each of these are multiples of 16.
    """

    gate_up: PackedWeights
    down: PackedWeights
    num_experts: int
    activation: Activation

    @property
    def width(self) -> int:
        """Elements of a result."""
        return self.down.columns // self.num_experts

    @property
    def inner(self) -> int:
        """Elements between both products."""
        return self.down.depth


@dataclass(frozen=True, slots=True)
class Experts:
    """PARTS = results of the `top_k` experts that each row of `source` was given to last, through GATED."""

    source: Rows
    weights: ExpertWeights
    top_k: int


@dataclass(frozen=True, slots=True)
class Mix:
    """target (+)= the sum of each row's PARTS, weighted and added in the order of experts, and of its row of SHARED.

    `routing`: of PARTS. `has_shared`: False leaves SHARED out. `is_gated`: SHARED is multiplied with the sigmoid of SHARED_GATE.
    """

    target: Rows
    routing: Routing
    adds: bool = False
    has_shared: bool = False
    is_gated: bool = False


Operator = (
    Norm | Linear | Gated | RotateAndStore | Attend | Embed | Head | Gather | Choose | Reduce | Route | Experts | Mix
)


@dataclass(frozen=True, slots=True)
class Program:
    """Operators in order, with `widths` of the row buffers that they use, query heads, block shape and dtype of rows."""

    operators: Sequence[Operator]
    widths: Mapping[Rows, int]
    num_heads: int
    shape: CacheShape
    dtype: torch.dtype


def num_cache_groups(operators: Sequence[Operator]) -> int:
    """Number of cache groups that the operators' layers are in; their block tables must be given."""
    return 1 + max((op.group for op in operators if isinstance(op, RotateAndStore | Attend)), default=0)


def check_groups(needed: int, given: int) -> None:
    """Raise ValueError unless there are block tables for each cache group."""
    if given != needed:
        raise ValueError(f"the program's layers are in {needed} cache groups; block tables of {given} were given")


class PreparedProgram(Protocol):
    """A program that can be run; owns its buffers."""

    def run(self, stream: torch.Tensor, batches: Sequence[AttentionBatch], pool: torch.Tensor) -> None:
        """Run the operators on `stream` [T, width], contiguous, in place.

        `batches`: one per cache group, which differ in tables and slots alone. `pool`: [layers, 2, blocks, block elements].
        """
        ...


@dataclass(frozen=True, slots=True)
class DecodeRows:
    """n rows that decode, as contiguous arrays on the host which each step changes.

    `token_ids`, `positions`: int32 [n], the token that the next step computes, and its position. `sequences`:
    int32 [n], the row of `block_tables` int32 [cache groups, S, most blocks]; both stay as they are.
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


@dataclass(frozen=True, slots=True)
class KeptRows:
    """What a device keeps of R sequences between steps, at fixed addresses.

    `token_ids` int64 [R] and `positions` int32 [R]: the token that each computes next, and its position.
    `block_tables`: int32 [cache groups, R, most blocks].
    """

    token_ids: torch.Tensor
    positions: torch.Tensor
    block_tables: torch.Tensor

    @classmethod
    def zeros(cls, num_rows: int, width: int, device: torch.device, num_groups: int = 1) -> "KeptRows":
        """Of `num_rows` sequences with up to `width` blocks each in each of `num_groups` cache groups."""
        positions = torch.zeros(num_rows, dtype=torch.int32, device=device)
        return cls(
            positions.long(), positions, torch.zeros(num_groups, num_rows, width, dtype=torch.int32, device=device)
        )


class FixedColumns:
    """Rows of a step at fixed addresses, and how their tokens are drawn; all in `memory`, so that one copy replaces them.

    `rows` int32: indexes into `KeptRows`, -1 = padding, which writes nowhere. The others as in the worker's SamplingRows.
    """

    _DTYPES = (
        ("seeds", np.dtype("<i8")),
        ("sequence_indexes", np.dtype("<i8")),
        ("top_ks", np.dtype("<i8")),
        ("rows", np.dtype("<i4")),
        ("temperatures", np.dtype("<f4")),
        ("top_ps", np.dtype("<f4")),
        ("min_ps", np.dtype("<f4")),
    )

    def __init__(self, num_rows: int, device: torch.device) -> None:
        self.num_rows = num_rows
        self.memory = torch.from_numpy(self.packed(rows=np.zeros(0, np.int32))).to(device)
        views, begin = {}, 0
        for name, dtype in self._DTYPES:
            end = begin + num_rows * dtype.itemsize
            views[name] = self.memory[begin:end].view(torch.from_numpy(np.zeros(0, dtype)).dtype)
            begin = end
        self.seeds, self.sequence_indexes, self.top_ks = views["seeds"], views["sequence_indexes"], views["top_ks"]
        self.rows, self.temperatures = views["rows"], views["temperatures"]
        self.top_ps, self.min_ps = views["top_ps"], views["min_ps"]

    def packed(self, **columns: NDArray[np.generic]) -> NDArray[np.uint8]:
        """The bytes of a step with these columns, by name, of equal length; what is not given is greedy."""
        parts = []
        for name, dtype in self._DTYPES:
            part = np.full(self.num_rows, _ABSENT.get(name, 0), dtype)
            given = columns.get(name)
            if given is not None:
                part[: len(given)] = given
            parts.append(part.view(np.uint8))
        return np.concatenate(parts)


_ABSENT = {"rows": -1, "top_ps": 1.0}


class FixedSteps(Protocol):
    """Decode steps in memory at fixed addresses, so that a device can record the launches of one and repeat them.

    A step has as many rows as `columns`, or fewer; each row is the next token of a sequence of `kept`. All work is in the
    order of the device's current stream, and none of it waits for the device.
    """

    kept: KeptRows
    columns: FixedColumns

    def run(self, num_rows: int) -> None:
        """Compute the first `num_rows` rows, choose their tokens, and move `kept` on by them.

        What is launched depends on `num_rows` alone.
        """
        ...

    def logits(self, num_rows: int) -> torch.Tensor:
        """float32 [num_rows, vocab] of the last `run`, with the values of the rows' dtype. The next one overwrites them."""
        ...

    def chosen(self, num_rows: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Of the last `run`: tokens int64 [num_rows], and whether all logits of a row are finite, bool [num_rows]. Copies."""
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

    def fixed_steps(self, program: Program, num_rows: int, kept: KeptRows, pool: torch.Tensor) -> FixedSteps | None:
        """Memory for steps of up to `num_rows` rows of `kept`, and a program from `Embed` to `Head`.

        `pool`: the cache, on the rows' device. None if rows are on the host, where nothing is launched.
        """
        ...


@runtime_checkable
class MixtureKernels(DecoderKernels, Protocol):
    """`DecoderKernels` for programs that may contain `Route`, `Experts` and `Mix`."""

    def mixture(
        self,
        rows: torch.Tensor,
        route: Route,
        experts: ExpertWeights,
        shared: torch.Tensor | None,
        shared_gate: torch.Tensor | None,
    ) -> torch.Tensor:
        """What these operators make of `rows` [T, depth]: [T, width].

        `shared` [T, width] and `shared_gate` [T, 1]: rows of SHARED and SHARED_GATE, None without.
        """
        ...
