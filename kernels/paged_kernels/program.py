"""What a program is: packed weights, and operators that take packed rows through all layers of a decoder at once.

Independent of models: callers match a model's modules and write the operators.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Literal

import torch

from paged_kernels.backend import AttentionRule, CacheShape
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
