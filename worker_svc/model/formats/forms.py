"""How the quantized weights of a linear module are stored, and which tensors of a checkpoint hold them.

`form_checks.py` compares the tensors' shapes with a form, `values.py` reads them. Does not import torch.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any, Protocol

Entries = Mapping[str, Mapping[str, Any]]
"""Of safetensors headers: `dtype`, `shape` and `data_offsets` by tensor name."""

WHOLE_GROUP = 128
"""Depths that share a row's rounding where a scale is for more of them, or for all."""
_GROUPS = frozenset({16, 32, 64})
_HALF, _SINGLE = 2, 4  # bytes of a factor


class UnsupportedWeights(ValueError):
    """A checkpoint's weights are stored in a way that is not supported. The text continues "--model PATH ..."."""


class Layout(Enum):
    """Tensors of a matrix: suffixes of the name of its numbers, scales and zero points, and the numbers' stored type.

    Numbers lie as [columns, depth] unless said otherwise; several in a word begin with its lowest bits.
    """

    FP8_BLOCKS = ("", "_scale_inv", "", frozenset({"F8_E4M3"}))
    FP8 = ("", "_scale", "", frozenset({"F8_E4M3"}))
    BYTES = ("", "_scale", "_zero_point", frozenset({"I8"}))
    WORDS = ("_packed", "_scale", "_zero_point", frozenset({"I32"}))
    """Zero points in words along the columns."""
    MXFP4 = ("_packed", "_scale", "", frozenset({"U8"}))
    """Scales are exponents of two."""
    NVFP4 = ("_packed", "_scale", "", frozenset({"U8"}))
    """Scales are FP8, divided by one for the matrix."""
    GPTQ = ("qweight", "scales", "qzeros", frozenset({"I32"}))
    """[words of depths, columns], zero points less one; the rest as [groups, columns]."""
    GPTQ_V2 = ("qweight", "scales", "qzeros", frozenset({"I32"}))
    """GPTQ with zero points as they are."""
    AWQ = ("qweight", "scales", "qzeros", frozenset({"I32"}))
    """[depth, words of columns]: even columns of a word before odd ones; the rest as in GPTQ."""

    # Members with equal values would be aliases of each other.
    def __new__(cls, *_suffixes: object) -> "Layout":
        """Number the members."""
        made = object.__new__(cls)
        made._value_ = len(cls.__members__)
        return made

    def __init__(self, numbers: str, scales: str, zeros: str, dtypes: frozenset[str]) -> None:
        self.numbers, self.scales, self.zeros, self.dtypes = numbers, scales, zeros, dtypes

    @property
    def is_float(self) -> bool:
        """True if numbers are E4M3: these times a scale, no integers."""
        return self in {Layout.FP8, Layout.FP8_BLOCKS}

    @property
    def in_words(self) -> bool:
        """True for the layouts of GPTQ and AWQ."""
        return self.numbers == "qweight"

    def stem(self, name: str, dtype: str) -> str | None:
        """What the names of a matrix's tensors begin with, if this one has its numbers."""
        if dtype not in self.dtypes or not name.endswith(self.numbers):
            return None
        stem = name.removesuffix(self.numbers)
        return stem if self.in_words or self is Layout.FP8_BLOCKS or stem.endswith(".weight") else None

    def target(self, stem: str) -> str:
        """Name of the weights that the matrix stands for."""
        return f"{stem}weight" if self.in_words else stem


@dataclass(frozen=True, slots=True)
class MatrixForm:
    """How a matrix is stored.

    `bits` of a number. `block`: columns and depths that have a scale in common, 0 = all. `has_zeros`: it must
    have zero points.
    """

    layout: Layout
    bits: int
    block: tuple[int, int]
    has_zeros: bool = False

    @property
    def kept_bits(self) -> int:
        """Bits of a number as it is packed. FP4's numbers are multiples of a half up to 6."""
        return 8 if self.layout in {Layout.MXFP4, Layout.NVFP4} else self.bits

    @property
    def kept_group(self) -> int:
        """Depths of a group as it is packed; 0 = the matrix is dequantized."""
        group = self.block[1]
        return WHOLE_GROUP if group % WHOLE_GROUP == 0 else group if group in _GROUPS else 0

    @property
    def factor_bytes(self) -> int:
        """Bytes of a group's scale, and offset, as most checkpoints have them packed."""
        has_single = self.layout is Layout.NVFP4 or self.layout.is_float
        return 2 * _SINGLE if self.has_zeros else _SINGLE if has_single else _HALF


@dataclass(frozen=True, slots=True)
class Matrix:
    """Quantized weights of a checkpoint.

    `target`: name of the weights; `stem`: what the names of its tensors begin with. `shape`: [..., columns, depth];
    the depth of WORDS may be less by a part of a word.
    """

    target: str
    stem: str
    form: MatrixForm
    shape: tuple[int, ...]


class WeightFormat(Protocol):
    """What a quantization_config says."""

    name: str
    """Its quant_method."""
    layouts: Collection[Layout]

    def form_of(self, module: str) -> MatrixForm | None:
        """How a module with this name in the checkpoint is stored if it is quantized; None if that is not said."""
        ...

    def skips(self, module: str) -> bool:
        """True if a module is not quantized. The checkpoint's tensors know better."""
        ...

    def with_tensors(self, names: Collection[str]) -> "WeightFormat":
        """The format of a checkpoint with tensors of these names."""
        ...


@dataclass(frozen=True, slots=True)
class UniformFormat:
    """A `WeightFormat` of one form. `skipped`: parts of names of modules that are not quantized.

    `instead`: the form if no tensor is named as scales of `form` are.
    """

    name: str
    form: MatrixForm
    skipped: tuple[str, ...] = ()
    instead: MatrixForm | None = None

    @property
    def layouts(self) -> tuple[Layout, ...]:
        """See WeightFormat."""
        return (self.form.layout,)

    def form_of(self, module: str) -> MatrixForm:
        """See WeightFormat."""
        return self.form

    def skips(self, module: str) -> bool:
        """See WeightFormat."""
        return any(part in module for part in self.skipped)

    def with_tensors(self, names: Collection[str]) -> "UniformFormat":
        """See WeightFormat."""
        if self.instead is None or any(name.endswith(self.form.layout.scales) for name in names):
            return self
        return replace(self, form=self.instead, instead=None)
