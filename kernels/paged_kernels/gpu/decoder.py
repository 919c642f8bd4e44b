"""Whole decoders on a GPU: products (`products.py`), and everything between them in Triton (`row_kernels.py`).

A program is a list of launches that depends on no value: what it computes on may be recorded once and repeated (a CUDA graph).
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from paged_kernels.backend import PADDING_SLOT, SCALED_MOST, AttentionBatch, AttentionRule, CacheShape
from paged_kernels.decoder import FixedColumns, KeptRows
from paged_kernels.gpu import row_kernels, token_draws
from paged_kernels.gpu.products import Products, pack_float8
from paged_kernels.program import (
    Attend,
    Embed,
    Gated,
    Gather,
    Head,
    Linear,
    Norm,
    PackedWeights,
    Program,
    Reduce,
    RotateAndStore,
    Rows,
)
from paged_kernels.quantized import FLOAT8, QuantizedWeight

_DTYPES = frozenset({torch.bfloat16, torch.float16, torch.float32})

Attention = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, AttentionBatch, CacheShape, AttentionRule], None]
"""Attention of queries [T, heads, head_dim] into an output of that shape, over a layer's cache."""


class TritonDecoders:
    """`DecoderKernels` on a GPU. Packed weights are plain rows, [columns, depth], or those of `products.pack_float8`."""

    keeps_row_bits = False

    def __init__(self, attend: Attention, *, upcast: bool) -> None:
        """`upcast`: for the interpreter, which cannot multiply bfloat16."""
        self._attend, self._products = attend, Products(upcast)

    def packs(self, dtype: torch.dtype, depth: int) -> bool:
        """See DecoderKernels."""
        return dtype in _DTYPES

    def packs_quantized(self, dtype: torch.dtype, numbers: torch.dtype) -> bool:
        """See DecoderKernels."""
        return dtype in _DTYPES and numbers == FLOAT8

    def pack(self, weight: torch.Tensor | QuantizedWeight, bias: torch.Tensor | None) -> PackedWeights:
        """See DecoderKernels. A contiguous weight is kept as it is."""
        if isinstance(weight, QuantizedWeight):
            return pack_float8(weight, bias)
        columns, depth = weight.shape
        data = weight.detach().contiguous().view(-1).view(torch.uint8)
        return PackedWeights(columns, depth, weight.dtype, data, None if bias is None else bias.detach())

    def linear(self, rows: torch.Tensor, weights: PackedWeights, *, wide: bool = False) -> torch.Tensor:
        """See DecoderKernels."""
        made = self._products.linear(rows, weights)
        return made.float() if wide else made

    def runs(self, dtype: torch.dtype, cache_dtype: torch.dtype) -> bool:
        """See DecoderKernels."""
        return dtype in _DTYPES and cache_dtype in _DTYPES | SCALED_MOST.keys()

    def prepare(self, program: Program, cache_dtype: torch.dtype) -> "TritonProgram":
        """See DecoderKernels."""
        return TritonProgram(program, self._attend, self._products)

    def prepare_decode(self, program: Program, cache_dtype: torch.dtype) -> None:
        """See DecoderKernels. Rows of a device are not on the host: `fixed_steps` is for them."""

    def fixed_steps(self, program: Program, num_rows: int, kept: KeptRows, pool: torch.Tensor) -> "TritonFixedSteps":
        """See DecoderKernels."""
        return TritonFixedSteps(TritonProgram(program, self._attend, self._products), num_rows, kept, pool)


class TritonProgram:
    """A program as launches in order."""

    def __init__(self, program: Program, attend: Attention, products: Products) -> None:
        self._program, self._attend, self._products = program, attend, products
        self._gates = {id(op): _side_by_side(op) for op in program.operators if isinstance(op, Gated)}
        self._take: dict[type, Callable[..., None]] = {
            Norm: self._norm,
            Linear: self._linear,
            Gated: self._gated,
            RotateAndStore: self._rotate,
            Attend: self._attention,
            Reduce: self._reduce,
        }

    @property
    def block_size(self) -> int:
        """Tokens of a block."""
        return self._program.shape.block_size

    @property
    def vocab_size(self) -> int:
        """Columns of the logits, for a program that ends with `Head`."""
        return next(op.width or op.weights.columns for op in self._program.operators if isinstance(op, Head))

    def run(self, stream: torch.Tensor, batches: Sequence[AttentionBatch], pool: torch.Tensor) -> None:
        """See PreparedProgram."""
        rows = {Rows.STREAM: stream}
        for op in self._program.operators:
            if type(op) in self._take:
                self._take[type(op)](op, rows, batches, pool)

    def logits(self, token_ids: torch.Tensor, batches: Sequence[AttentionBatch], pool: torch.Tensor) -> torch.Tensor:
        """Logits [T, vocab] of `token_ids` [T], for a program from `Embed` to `Head` and `Gather`; in the dtype of its rows."""
        first, *others = self._program.operators
        assert isinstance(first, Embed)
        stream = row_kernels.embed(first, token_ids)
        self.run(stream, batches, pool)
        head = next(op for op in others if isinstance(op, Head))
        logits = self._products.linear(stream, head.weights)
        if head.cap is not None:
            logits = torch.tanh(logits / head.cap) * head.cap
        for op in others:
            if isinstance(op, Gather):
                logits = op.sums.all_gather(logits)
        return logits

    def _norm(self, op: Norm, rows: dict[Rows, torch.Tensor], *_: Any) -> None:
        if op.target not in rows:
            rows[op.target] = torch.empty_like(rows[op.source])
        row_kernels.norm(op, rows[op.source], rows[op.target])

    def _linear(self, op: Linear, rows: dict[Rows, torch.Tensor], *_: Any) -> None:
        if op.adds:
            self._products.add_linear(rows[op.source], op.weights, rows[op.target])
        else:
            rows[op.target] = self._products.linear(rows[op.source], op.weights)

    def _reduce(self, op: Reduce, rows: dict[Rows, torch.Tensor], *_: Any) -> None:
        values = rows[op.source]
        op.sums.all_reduce(values)
        if op.adds:
            rows[op.target] += values
        else:
            rows[op.target] = values

    def _gated(self, op: Gated, rows: dict[Rows, torch.Tensor], *_: Any) -> None:
        both = self._gates[id(op)]
        rows[op.target] = row_kernels.gated(self._products.linear(rows[op.source], both), op.activation)

    def _rotate(
        self, op: RotateAndStore, rows: dict[Rows, torch.Tensor], batches: Sequence[AttentionBatch], pool: torch.Tensor
    ) -> None:
        shape, batch = self._program.shape, batches[op.group]
        row_kernels.rotate_and_store(op, rows[Rows.HEADS], self._program.num_heads, pool[op.layer], batch, shape)

    def _attention(
        self, op: Attend, rows: dict[Rows, torch.Tensor], batches: Sequence[AttentionBatch], pool: torch.Tensor
    ) -> None:
        shape, num_heads = self._program.shape, self._program.num_heads
        heads = rows[Rows.HEADS]
        queries = heads[:, : num_heads * shape.head_dim].view(len(heads), num_heads, shape.head_dim)
        out = heads.new_empty(queries.shape)
        self._attend(queries, out, pool[op.layer], batches[op.group], shape, op.rule)
        rows[Rows.ATTENDED] = out.view(len(heads), -1)


def _side_by_side(op: Gated) -> PackedWeights:
    """Gates and ups as one matrix: where one follows the other in memory, as it is."""
    gate, up = op.gate, op.up
    parts = [(gate.data, up.data)] + ([] if gate.bias is None or up.bias is None else [(gate.bias, up.bias)])
    joined = [_view_of_both(*part) if _follows(*part) else torch.cat(part) for part in parts]
    bias = joined[1] if len(joined) > 1 else None
    return PackedWeights(gate.columns + up.columns, gate.depth, gate.dtype, joined[0], bias, gate.form)


def _follows(first: torch.Tensor, second: torch.Tensor) -> bool:
    behind = first.storage_offset() + len(first) == second.storage_offset()
    return behind and first.data_ptr() + first.nbytes == second.data_ptr()


def _view_of_both(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    return first.as_strided((len(first) + len(second),), (1,))


class TritonFixedSteps:
    """See FixedSteps."""

    def __init__(self, program: TritonProgram, num_rows: int, kept: KeptRows, pool: torch.Tensor) -> None:
        self._program, self._pool, device = program, pool, pool.device
        self.kept, self.columns = kept, FixedColumns(num_rows, device)
        self._token_ids = torch.zeros(num_rows, dtype=torch.int64, device=device)
        self._sequences = torch.zeros(num_rows, dtype=torch.int32, device=device)
        self._positions = torch.zeros(num_rows, dtype=torch.int32, device=device)
        self._slots = torch.full((len(kept.block_tables), num_rows), PADDING_SLOT, dtype=torch.int64, device=device)
        self._drawn = torch.zeros(num_rows, dtype=torch.int64, device=device)
        self._logits = torch.empty(num_rows, program.vocab_size, dtype=torch.float32, device=device)
        self._chosen = torch.zeros(num_rows * 9, dtype=torch.uint8, device=device)
        self._batches: dict[int, tuple[AttentionBatch, ...]] = {}

    def run(self, num_rows: int) -> None:
        """See FixedSteps."""
        batches, drawn = self._of_groups(num_rows), self._drawn[:num_rows]
        for batch in batches:
            batch.plans.clear()
        row_kernels.begin_step(
            self.columns, self.kept, self._token_ids, batches[0], self._slots, drawn, self._program.block_size
        )
        logits = self._logits[:num_rows]
        logits.copy_(self._program.logits(self._token_ids[:num_rows], batches, self._pool))
        tokens, finite = self._views(self._chosen, num_rows)
        token_draws.choose_into(logits, tokens, finite)
        token_draws.draw_chosen(logits, tokens, self.columns, self.kept, drawn, finite)

    def logits(self, num_rows: int) -> torch.Tensor:
        """See FixedSteps."""
        return self._logits[:num_rows]

    def chosen(self, num_rows: int) -> tuple[torch.Tensor, torch.Tensor]:
        """See FixedSteps."""
        return self._views(self._chosen.clone(), num_rows)

    def _views(self, chosen: torch.Tensor, num_rows: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Tokens and whether rows are finite, in one memory, so that they are copied at once."""
        begin = len(self._positions) * 8
        return chosen[: num_rows * 8].view(torch.int64), chosen[begin : begin + num_rows].view(torch.bool)

    def _of_groups(self, count: int) -> tuple[AttentionBatch, ...]:
        """The first rows, for each cache group."""
        if count not in self._batches:
            sequences, positions, offsets = self._sequences[:count], self._positions[:count], np.arange(count + 1)
            self._batches[count] = tuple(
                AttentionBatch(sequences, positions, slots[:count], tables, offsets.astype(np.int32))
                for slots, tables in zip(self._slots, self.kept.block_tables, strict=True)
            )
        return self._batches[count]
