"""Whole decoders on CPU by the compiled library: cpu/products.h, integers.h and float8.h multiply, decoder.h runs programs."""

import ctypes
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray

from paged_kernels.backend import AttentionBatch
from paged_kernels.cpu_operators import CpuOperator, CpuStep, form_fields, sums_of, translated
from paged_kernels.decoder import DecodeRows, KeptRows
from paged_kernels.program import (
    Experts,
    ExpertWeights,
    Head,
    Mix,
    PackedWeights,
    Program,
    Route,
    Rows,
    check_groups,
    num_cache_groups,
)
from paged_kernels.ranks import RankSums
from paged_kernels.weight_packing import NAMES, WeightPacking, function_of, pointer

_CACHES = {
    (torch.float32, torch.float32): "float32_float32",
    (torch.bfloat16, torch.bfloat16): "bfloat16_bfloat16",
    (torch.float32, torch.bfloat16): "float32_bfloat16",
    (torch.float32, torch.float16): "float32_float16",
    (torch.float32, torch.int8): "float32_int8",
    (torch.bfloat16, torch.int8): "bfloat16_int8",
    (torch.float32, torch.float8_e4m3fn): "float32_float8",
    (torch.bfloat16, torch.float8_e4m3fn): "bfloat16_float8",
}
_INT, _I64, _POINTER = ctypes.c_int32, ctypes.c_int64, ctypes.c_void_p


class CpuDecoders(WeightPacking):
    """`DecoderKernels` of the compiled library, on torch's current number of threads."""

    keeps_row_bits = True

    def __init__(self, library: ctypes.CDLL) -> None:
        super().__init__(library)
        linear_types = [_POINTER] * 2 + [_INT] * 2 + [_POINTER] * 2 + [_I64] + [_INT] * 6
        self._linear = {
            dtype: function_of(library, f"quire_linear_{name}", linear_types) for dtype, name in NAMES.items()
        }
        run_types = [ctypes.POINTER(CpuOperator), ctypes.c_int, ctypes.POINTER(CpuStep)]
        self._run = {
            dtypes: function_of(library, f"quire_decode_{name}", run_types) for dtypes, name in _CACHES.items()
        }
        self._next = {
            dtypes: function_of(library, f"quire_decode_next_{name}", run_types, _INT)
            for dtypes, name in _CACHES.items()
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
            *form_fields(weights.form).values(),
            torch.get_num_threads(),
        )
        return out

    def mixture(
        self,
        rows: torch.Tensor,
        route: Route,
        experts: ExpertWeights,
        shared: torch.Tensor | None,
        shared_gate: torch.Tensor | None,
    ) -> torch.Tensor:
        """See MixtureKernels."""
        top_k, width = route.routing.top_k, experts.width
        given = {Rows.NORMED: rows, Rows.SHARED: shared, Rows.SHARED_GATE: shared_gate}
        buffers = {name: part.contiguous() for name, part in given.items() if part is not None}
        inner = {Rows.STREAM: width, Rows.GATED: top_k * experts.inner, Rows.PARTS: top_k * width}
        buffers |= {name: rows.new_empty(len(rows), columns) for name, columns in inner.items()}
        operators = translated(
            [
                replace(route, source=Rows.NORMED),
                Experts(Rows.NORMED, experts, top_k),
                Mix(Rows.STREAM, route.routing, has_shared=shared is not None, is_gated=shared_gate is not None),
            ]
        )
        places = np.array([buffers[name].data_ptr() if name in buffers else 0 for name in Rows], np.uint64)
        widths = np.array([buffers[name].shape[1] if name in buffers else 0 for name in Rows], np.int64)
        step = CpuStep(places.ctypes.data, widths.ctypes.data, tokens=len(rows), threads=torch.get_num_threads())
        self._run[rows.dtype, rows.dtype](operators, len(operators), ctypes.byref(step))
        return buffers[Rows.STREAM]

    def runs(self, dtype: torch.dtype, cache_dtype: torch.dtype) -> bool:
        """See DecoderKernels."""
        return (dtype, cache_dtype) in self._run

    def prepare(self, program: Program, cache_dtype: torch.dtype) -> "CpuProgram":
        """See DecoderKernels."""
        return CpuProgram(program, self._run[program.dtype, cache_dtype])

    def prepare_decode(self, program: Program, cache_dtype: torch.dtype) -> "CpuDecodeProgram":
        """See DecoderKernels."""
        return CpuDecodeProgram(program, self._next[program.dtype, cache_dtype])

    def fixed_steps(self, program: Program, num_rows: int, kept: KeptRows, pool: torch.Tensor) -> None:
        """See DecoderKernels."""


class CpuProgram:
    """A program in the library's form. Keeps buffers for the rows of the largest step so far."""

    def __init__(self, program: Program, run: Callable[..., None]) -> None:
        self._program, self._run = program, run
        self._operators, self._widths = translated(program.operators), _widths(program)
        self._sums, self._num_groups = sums_of(program.operators), num_cache_groups(program.operators)
        self._rows: dict[Rows, torch.Tensor] = {}
        self._places = np.zeros(len(Rows), np.uint64)
        self._num_rows = 0

    def run(self, stream: torch.Tensor, batches: Sequence[AttentionBatch], pool: torch.Tensor) -> None:
        """See PreparedProgram."""
        self._make_room(len(stream))
        self._places[Rows.STREAM] = stream.data_ptr()
        check_groups(self._num_groups, len(batches))
        shape, batch = self._program.shape, batches[0]
        tables = _addresses(each.block_tables.data_ptr() for each in batches)
        slots = _addresses(each.slots.data_ptr() for each in batches)
        step = CpuStep(
            self._places.ctypes.data,
            self._widths.ctypes.data,
            pool.data_ptr(),
            pool.shape[2],
            tables.ctypes.data,
            batch.block_tables.stride(0),
            batch.sequences.data_ptr(),
            batch.positions.data_ptr(),
            slots.ctypes.data,
            None,
            None,
            None,
            len(stream),
            self._program.num_heads,
            shape.num_kv_heads,
            shape.head_dim,
            shape.block_size,
            torch.get_num_threads(),
            len(batches),
        )
        self._run(self._operators, len(self._operators), ctypes.byref(step))
        if self._sums is not None:
            self._sums.check()

    def _make_room(self, num_rows: int) -> None:
        if num_rows > self._num_rows:
            for rows in set(Rows) - {Rows.STREAM}:
                self._rows[rows] = torch.empty(num_rows, self._program.widths.get(rows, 0), dtype=self._program.dtype)
                self._places[rows] = self._rows[rows].data_ptr()
            self._num_rows = num_rows


def _addresses(of_groups: Iterable[int]) -> NDArray[np.uint64]:
    """Where each cache group has its part."""
    return np.fromiter(of_groups, np.uint64)


def _widths(program: Program) -> NDArray[np.int64]:
    return np.array([program.widths.get(rows, 0) for rows in Rows], np.int64)


class CpuDecodeProgram:
    """See DecodeProgram."""

    def __init__(self, program: Program, run: Callable[..., int]) -> None:
        self._program, self._run = program, run
        self._operators, self._widths = translated(program.operators), _widths(program)
        self._vocab_size = next(op.width or op.weights.columns for op in program.operators if isinstance(op, Head))
        self._num_groups = num_cache_groups(program.operators)

    def begin(self, rows: DecodeRows, pool: torch.Tensor) -> "CpuDecodeRun":
        """See DecodeProgram."""
        num_rows, program = len(rows.token_ids), self._program
        buffers = [torch.empty(num_rows, program.widths.get(name, 0), dtype=program.dtype) for name in Rows]
        places = np.array([buffer.data_ptr() for buffer in buffers], np.uint64)
        num_groups = len(rows.block_tables)
        check_groups(self._num_groups, num_groups)
        slots, finite = np.empty((num_groups, num_rows), np.int64), np.empty(num_rows, np.bool_)
        of_tables, of_slots = (_addresses(part.ctypes.data for part in parts) for parts in (rows.block_tables, slots))
        logits = torch.empty(num_rows, self._vocab_size)
        step = CpuStep(
            places.ctypes.data,
            self._widths.ctypes.data,
            pool.data_ptr(),
            pool.shape[2],
            of_tables.ctypes.data,
            rows.block_tables.shape[2],
            rows.sequences.ctypes.data,
            rows.positions.ctypes.data,
            of_slots.ctypes.data,
            rows.token_ids.ctypes.data,
            logits.data_ptr(),
            finite.ctypes.data,
            num_rows,
            program.num_heads,
            program.shape.num_kv_heads,
            program.shape.head_dim,
            program.shape.block_size,
            torch.get_num_threads(),
            num_groups,
        )
        call = partial(self._run, self._operators, len(self._operators), ctypes.byref(step))
        memory = (rows, pool, buffers, places, slots, of_tables, of_slots, self)
        return CpuDecodeRun(logits, finite, call, sums_of(program.operators), memory)


@dataclass(frozen=True, slots=True)
class CpuDecodeRun:
    """See DecodeRun. `memory`: what `call` uses."""

    logits: torch.Tensor
    finite: NDArray[np.bool_]
    call: Callable[[], int]
    sums: RankSums | None
    memory: tuple[object, ...]

    def step(self) -> bool:
        """See DecodeRun."""
        is_finite = self.call() == 0
        if self.sums is not None:
            self.sums.check()
        return is_finite
