"""Programs over random rows for tests: batches, a cache whose free blocks are full of NaN, ways to see what was made."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import torch
from torch.nn import functional

from paged_kernels.backend import PADDING_SLOT, SCALED_MOST, AttentionBatch, CacheShape
from paged_kernels.cpu_compiled import CompiledCpuBackend
from paged_kernels.decoder import DecoderKernels
from paged_kernels.program import Linear, Operator, PackedWeights, Program, Rows
from paged_kernels.quantized import QuantizedWeight, quantized

Spans = Sequence[tuple[int, int, int]]
"""Of each sequence in a step: its row of the block tables, first position, and the position behind its last."""


def random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    """Normally distributed."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def full_of_nan(sizes: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """A cache of whose elements nothing may be used. Of numbers with scales, these are NaN: all their bits are set."""
    if dtype in SCALED_MOST:
        return torch.full(sizes, 255, dtype=torch.uint8).view(dtype)
    return torch.full(sizes, float("nan"), dtype=dtype)


def packed(
    kernels: DecoderKernels, weight: torch.Tensor, bias: torch.Tensor | None, bits: int | Literal["fp8"]
) -> PackedWeights:
    """Packed in groups of 32 as E4M3 numbers or integers of 8 or 4 bits, or plain with 0."""
    form = fp8(weight, 32) if bits == "fp8" else quantized(weight, bits, 32) if bits else weight
    return kernels.pack(form, bias)


def fp8(weight: torch.Tensor, group: int) -> QuantizedWeight:
    """`weight` rounded to E4M3 numbers, the largest of each group of depths to 448."""
    depth = weight.shape[1]
    groups = functional.pad(weight.float(), (0, -depth % group)).unflatten(1, (-1, group))
    scales = groups.abs().amax(2) / 448
    numbers = (groups / scales[:, :, None]).flatten(1)[:, :depth].to(torch.float8_e4m3fn).contiguous()
    return QuantizedWeight(numbers, scales, None, 8, group, weight.dtype)


def moves(kernels: DecoderKernels, columns: int, depth: int, dtype: torch.dtype) -> PackedWeights:
    """Weights that take rows over as they are, cut off or filled up with zeros."""
    return kernels.pack(torch.eye(columns, depth, dtype=dtype), None)


@dataclass
class Cache:
    """Blocks of some sequences in random order among free ones, all full of NaN at first."""

    shape: CacheShape
    num_sequences: int
    most_tokens: int
    dtype: torch.dtype = torch.float32
    num_layers: int = 2
    seed: int = 0
    tables: torch.Tensor = field(init=False)
    pool: torch.Tensor = field(init=False)

    def __post_init__(self) -> None:
        width = -(-self.most_tokens // self.shape.block_size)
        num_blocks = self.num_sequences * width + 3
        order = torch.randperm(num_blocks, generator=torch.Generator().manual_seed(self.seed))
        self.tables = order[: self.num_sequences * width].view(-1, width).to(torch.int32).contiguous()
        sizes = (self.num_layers, 2, num_blocks, self.shape.block_elements(self.dtype))
        self.pool = full_of_nan(sizes, self.dtype)

    def slots(self, row: int, begin: int, end: int) -> torch.Tensor:
        """Where tokens begin .. end - 1 of a sequence lie."""
        places, size = torch.arange(begin, end), self.shape.block_size
        return self.tables[row].long()[places // size] * size + places % size

    def batch(self, spans: Spans, padding: int = 0) -> AttentionBatch:
        """A step with the tokens of `spans`, and padding behind them."""
        counts = [end - begin for _, begin, end in spans]
        pad = torch.zeros(padding, dtype=torch.int32)
        rows = [torch.full((end - begin,), row, dtype=torch.int32) for row, begin, end in spans]
        positions = [torch.arange(begin, end, dtype=torch.int32) for _, begin, end in spans]
        slots = [self.slots(*span) for span in spans]
        return AttentionBatch(
            sequences=torch.cat([*rows, pad]),
            positions=torch.cat([*positions, pad]),
            slots=torch.cat([*slots, torch.full((padding,), PADDING_SLOT)]),
            block_tables=self.tables,
            offsets=np.cumsum([0, *counts], dtype=np.int32),
        )


@dataclass(frozen=True)
class Bench:
    """Runs operators on rows as a program does. `widths`: of the rows that operators use; others are one element wide."""

    backend: CompiledCpuBackend
    widths: Mapping[Rows, int]
    num_heads: int = 1
    dtype: torch.dtype = torch.float32

    def run(
        self,
        operators: Sequence[Operator],
        stream: torch.Tensor,
        cache: Cache | None = None,
        batch: AttentionBatch | None = None,
    ) -> torch.Tensor:
        """What becomes of `stream`, which stays as it is."""
        cache = cache or Cache(CacheShape(16, 1, 1), 1, len(stream), self.dtype)
        batch = batch or cache.batch([(0, 0, len(stream))])
        widths = {rows: 2 for rows in Rows} | dict(self.widths)
        program = Program(operators, widths, self.num_heads, cache.shape, self.dtype)
        prepared = self.backend.decoder.prepare(program, cache.dtype)
        made = stream.clone()
        prepared.run(made, [batch], cache.pool)
        return made

    def moved(self, source: Rows, target: Rows) -> Linear:
        """Rows of `source` become rows of `target`."""
        return Linear(source, target, moves(self.backend.decoder, self.widths[target], self.widths[source], self.dtype))
