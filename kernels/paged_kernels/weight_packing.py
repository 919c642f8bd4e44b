"""Packing of weights for the compiled library: into the order in which cpu/weight_packing.h lets products read them."""

import ctypes
from collections.abc import Callable
from typing import Any

import torch

from paged_kernels.host_memory import HostArena
from paged_kernels.program import PackedForm, PackedWeights, Stored
from paged_kernels.quantized import MOST_FLOAT8_SCALE, QuantizedWeight, without_nan

NAMES = {torch.float32: "float32", torch.bfloat16: "bfloat16"}
"""Types of rows and plain weights, as the library's functions are named."""
STORED: dict[Stored, int] = {"plain": 0, "int8": 1, "int4": 2, "fp8": 3}
"""Stored forms, as the library numbers them."""
_LANES = 16
_INT, _POINTER = ctypes.c_int32, ctypes.c_void_p


class WeightPacking:
    """The packing half of `DecoderKernels`, on torch's current number of threads."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._memory = HostArena()
        types = [_POINTER] * 2 + [_INT] * 3
        self._pack = {dtype: function_of(library, f"quire_pack_{name}", types) for dtype, name in NAMES.items()}
        self._pack_integers = function_of(library, "quire_pack_integers", [_POINTER] * 4 + [_INT] * 6)

    def packs(self, dtype: torch.dtype, depth: int) -> bool:
        """See DecoderKernels."""
        return dtype in NAMES and depth % (4 // dtype.itemsize) == 0

    def packs_quantized(self, dtype: torch.dtype, numbers: torch.dtype) -> bool:
        """See DecoderKernels."""
        return dtype in NAMES

    def pack(self, weight: torch.Tensor | QuantizedWeight, bias: torch.Tensor | None) -> PackedWeights:
        """See DecoderKernels."""
        kept = None if bias is None else bias.contiguous().clone()
        if isinstance(weight, QuantizedWeight):
            form = _form_of(weight)
            return PackedWeights(weight.columns, weight.depth, weight.dtype, self._integers(weight, form), kept, form)
        columns, depth = weight.shape
        weight = weight.contiguous()
        data = self._memory.bytes(-(-columns // _LANES) * _LANES * depth * weight.itemsize)
        self._pack[weight.dtype](weight.data_ptr(), data.data_ptr(), columns, depth, torch.get_num_threads())
        return PackedWeights(columns, depth, weight.dtype, data, kept)

    def _integers(self, weight: QuantizedWeight, form: PackedForm) -> torch.Tensor:
        num_groups = -(-weight.depth // weight.group)
        factor_bytes = (2 if form.half else 4) * (2 if form.has_offsets else 1)
        panels = -(-weight.columns // _LANES)
        data = self._memory.bytes(panels * _LANES * num_groups * (factor_bytes + weight.group * weight.bits // 8))
        numbers, scales = weight.numbers.contiguous(), without_nan(weight).contiguous()
        offsets = None if weight.offsets is None else weight.offsets.contiguous()
        self._pack_integers(
            numbers.data_ptr(),
            scales.data_ptr(),
            pointer(offsets),
            data.data_ptr(),
            weight.columns,
            weight.depth,
            STORED[form.stored],
            form.group,
            form.half,
            torch.get_num_threads(),
        )
        return data


def function_of(library: ctypes.CDLL, name: str, types: list[Any], returns: Any = None) -> Callable[..., Any]:
    """A function of the library with these argument types; returns nothing by default."""
    function = library[name]
    function.argtypes, function.restype = types, returns
    return function


def pointer(tensor: torch.Tensor | None) -> int | None:
    """Address of its data; None for no tensor."""
    return None if tensor is None else tensor.data_ptr()


def _form_of(weight: QuantizedWeight) -> PackedForm:
    """How such weights are packed. Raises ValueError for groups that the library does not have."""
    if weight.bits not in {4, 8} or weight.group % _LANES:
        raise ValueError(
            f"{weight.bits} bits in groups of {weight.group}; 4 or 8 bits and a multiple of {_LANES} needed"
        )
    if weight.is_float and bool((weight.scales.abs() >= MOST_FLOAT8_SCALE).any()):
        raise ValueError(f"a scale of E4M3 weights is {float(weight.scales.abs().max()):g}; less than 256 needed")
    half = _is_half(weight.scales) and (weight.offsets is None or _is_half(weight.offsets))
    stored: Stored = "fp8" if weight.is_float else "int4" if weight.bits == 4 else "int8"
    return PackedForm(stored, weight.group, weight.offsets is not None, half)


def _is_half(factors: torch.Tensor) -> bool:
    """True if float16 has all of these numbers."""
    return torch.equal(factors.half().float(), factors)
