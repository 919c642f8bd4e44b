"""Whole decoders on CPU by the compiled library: cpu/products.h and cpu/integers.h multiply, cpu/decoder.h runs programs."""

import ctypes
from collections.abc import Callable
from functools import singledispatchmethod

import numpy as np
import torch

from paged_kernels import decoder
from paged_kernels.backend import AttentionBatch
from paged_kernels.decoder import PackedForm, PackedWeights, Program, Rows
from paged_kernels.weight_packing import NAMES, STORED, WeightPacking, function_of, pointer

_CACHES = {
    (torch.float32, torch.float32): "float32_float32",
    (torch.bfloat16, torch.bfloat16): "bfloat16_bfloat16",
    (torch.float32, torch.bfloat16): "float32_bfloat16",
    (torch.float32, torch.float16): "float32_float16",
}
_ACTIVATIONS = {"silu": 0, "gelu_tanh": 1}
_NORM, _LINEAR, _GATED, _PLACE, _ATTEND = range(5)
_INT, _FLOAT, _I64, _POINTER = ctypes.c_int32, ctypes.c_float, ctypes.c_int64, ctypes.c_void_p


class _Operator(ctypes.Structure):
    """QuireOperator of cpu/decoder.h."""

    _fields_ = [
        *((name, _INT) for name in ("kind", "source", "target", "adds", "columns", "depth", "activation", "one_plus")),
        *((name, _INT) for name in ("layer", "window")),
        *((name, _FLOAT) for name in ("eps", "scale", "softcap")),
        ("rotary", _INT),
        *((name, _POINTER) for name in ("weights", "bias", "second", "second_bias")),
        *((name, _INT) for name in ("stored", "group", "offsets", "half")),
    ]


class _Step(ctypes.Structure):
    """QuireStep of cpu/decoder.h."""

    _fields_ = [
        ("buffers", _POINTER),
        ("widths", _POINTER),
        ("pool", _POINTER),
        ("num_blocks", _I64),
        ("tables", _POINTER),
        ("table_stride", _I64),
        ("sequences", _POINTER),
        ("positions", _POINTER),
        ("slots", _POINTER),
        ("tokens", _I64),
        *((name, _INT) for name in ("heads", "kv_heads", "head_dim", "block_size", "threads", "reserved")),
    ]


class CpuDecoders(WeightPacking):
    """`DecoderKernels` of the compiled library, on torch's current number of threads."""

    def __init__(self, library: ctypes.CDLL) -> None:
        super().__init__(library)
        linear_types = [_POINTER] * 2 + [_INT] * 2 + [_POINTER] * 2 + [_I64] + [_INT] * 6
        self._linear = {
            dtype: function_of(library, f"quire_linear_{name}", linear_types) for dtype, name in NAMES.items()
        }
        run_types = [ctypes.POINTER(_Operator), ctypes.c_int, ctypes.POINTER(_Step)]
        self._run = {
            dtypes: function_of(library, f"quire_decode_{name}", run_types) for dtypes, name in _CACHES.items()
        }

    def linear(self, rows: torch.Tensor, weights: PackedWeights, *, wide: bool = False) -> torch.Tensor:
        """See DecoderKernels."""
        rows = rows.contiguous()
        out = torch.empty(*rows.shape[:-1], weights.columns, dtype=torch.float32 if wide else rows.dtype)
        self._linear[weights.dtype](
            weights.data.data_ptr(),
            pointer(weights.bias),
            weights.columns,
            weights.depth,
            rows.data_ptr(),
            out.data_ptr(),
            rows.numel() // weights.depth,
            wide,
            *_form_fields(weights.form).values(),
            torch.get_num_threads(),
        )
        return out

    def runs(self, dtype: torch.dtype, cache_dtype: torch.dtype) -> bool:
        """See DecoderKernels."""
        return (dtype, cache_dtype) in self._run

    def prepare(self, program: Program, cache_dtype: torch.dtype) -> "CpuProgram":
        """See DecoderKernels."""
        return CpuProgram(program, self._run[program.dtype, cache_dtype])


class CpuProgram:
    """A program in the library's form. Keeps buffers for the rows of the largest step so far."""

    def __init__(self, program: Program, run: Callable[..., None]) -> None:
        self._program, self._run = program, run
        self._operators = (_Operator * len(program.operators))(*map(_Translator().operator, program.operators))
        self._widths = np.array([program.widths[rows] for rows in Rows], np.int64)
        self._rows: dict[Rows, torch.Tensor] = {}
        self._places = np.zeros(len(Rows), np.uint64)
        self._num_rows = 0

    def run(self, stream: torch.Tensor, batch: AttentionBatch, pool: torch.Tensor) -> None:
        """See PreparedProgram."""
        self._make_room(len(stream))
        self._places[Rows.STREAM] = stream.data_ptr()
        shape = self._program.shape
        step = _Step(
            self._places.ctypes.data,
            self._widths.ctypes.data,
            pool.data_ptr(),
            pool.shape[2],
            batch.block_tables.data_ptr(),
            batch.block_tables.stride(0),
            batch.sequences.data_ptr(),
            batch.positions.data_ptr(),
            batch.slots.data_ptr(),
            len(stream),
            self._program.num_heads,
            shape.num_kv_heads,
            shape.head_dim,
            shape.block_size,
            torch.get_num_threads(),
        )
        self._run(self._operators, len(self._operators), ctypes.byref(step))

    def _make_room(self, num_rows: int) -> None:
        if num_rows > self._num_rows:
            for rows in set(Rows) - {Rows.STREAM}:
                self._rows[rows] = torch.empty(num_rows, self._program.widths[rows], dtype=self._program.dtype)
                self._places[rows] = self._rows[rows].data_ptr()
            self._num_rows = num_rows


class _Translator:
    """Converts operators to the library's form; their tensors must outlive it."""

    @singledispatchmethod
    def operator(self, given: object) -> _Operator:
        """Raise TypeError for an operator that the library does not have."""
        raise TypeError(f"unknown operator: {given!r}")

    @operator.register
    def _(self, given: decoder.Norm) -> _Operator:
        return _Operator(
            kind=_NORM, source=given.source, target=given.target, adds=given.adds, one_plus=given.one_plus, eps=given.eps,
            weights=given.weight.data_ptr(),
        )  # fmt: skip

    @operator.register
    def _(self, given: decoder.Linear) -> _Operator:
        weights = given.weights
        return _Operator(
            kind=_LINEAR, source=given.source, target=given.target, adds=given.adds, columns=weights.columns,
            depth=weights.depth, weights=weights.data.data_ptr(), bias=pointer(weights.bias),
            **_form_fields(weights.form),
        )  # fmt: skip

    @operator.register
    def _(self, given: decoder.Gated) -> _Operator:
        gate, up = given.gate, given.up
        if gate.form != up.form:
            raise ValueError(f"gate is packed as {gate.form}, up as {up.form}; both must have the same form")
        return _Operator(
            kind=_GATED, source=given.source, target=given.target, columns=gate.columns, depth=gate.depth,
            activation=_ACTIVATIONS[given.activation], weights=gate.data.data_ptr(), bias=pointer(gate.bias),
            second=up.data.data_ptr(), second_bias=pointer(up.bias), **_form_fields(gate.form),
        )  # fmt: skip

    @operator.register
    def _(self, given: decoder.RotateAndStore) -> _Operator:
        norm = given.norm
        made = _Operator(
            kind=_PLACE, source=Rows.HEADS, target=Rows.HEADS, layer=given.layer, second=pointer(given.cosines),
            second_bias=pointer(given.sines), rotary=0 if given.cosines is None else given.cosines.shape[1],
        )  # fmt: skip
        if norm is not None:
            made.weights, made.bias = norm.queries.data_ptr(), norm.keys.data_ptr()
            made.eps, made.one_plus = norm.eps, norm.one_plus
        return made

    @operator.register
    def _(self, given: decoder.Attend) -> _Operator:
        rule = given.rule
        return _Operator(
            kind=_ATTEND, source=Rows.HEADS, target=Rows.ATTENDED, layer=given.layer, window=rule.sliding_window or 0,
            scale=rule.scale, softcap=rule.softcap or 0.0,
        )  # fmt: skip


def _form_fields(form: PackedForm) -> dict[str, int]:
    return {
        "stored": STORED[form.stored],
        "group": form.group,
        "offsets": int(form.has_offsets),
        "half": int(form.half),
    }
