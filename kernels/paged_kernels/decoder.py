"""How programs are run: steps on packed rows, decode steps that a backend repeats by itself, and what a backend offers of these.

Optional for a backend (`registry.decoder_kernels`).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np
import torch
from numpy.typing import NDArray

from paged_kernels.backend import AttentionBatch
from paged_kernels.program import ExpertWeights, PackedWeights, Program, Route
from paged_kernels.quantized import QuantizedWeight


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
