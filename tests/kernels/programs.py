"""Programs over random rows for tests: batches, a cache whose free blocks are full of NaN, ways to see what was made."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from paged_kernels.backend import PADDING_SLOT, AttentionBatch, CacheShape
from paged_kernels.cpu_compiled import CompiledCpuBackend
from paged_kernels.decoder import DecoderKernels, Linear, Operator, PackedWeights, Program, Rows
from paged_kernels.quantized import quantized

Spans = Sequence[tuple[int, int, int]]
"""Of each sequence in a step: its row of the block tables, first position, and the position behind its last."""


def random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    """Normally distributed."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def full_of_nan(sizes: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """A cache of whose elements nothing may be used. Of int8, the scales are NaN: all their bits are set."""
    return torch.full(sizes, -1 if dtype == torch.int8 else float("nan"), dtype=dtype)


def packed(kernels: DecoderKernels, weight: torch.Tensor, bias: torch.Tensor | None, bits: int) -> PackedWeights:
    """Packed in groups of 32 with 8 or 4 bits, or plain with 0."""
    return kernels.pack(quantized(weight, bits, 32) if bits else weight, bias)


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
        prepared.run(made, batch, cache.pool)
        return made

    def moved(self, source: Rows, target: Rows) -> Linear:
        """Rows of `source` become rows of `target`."""
        return Linear(source, target, moves(self.backend.decoder, self.widths[target], self.widths[source], self.dtype))
