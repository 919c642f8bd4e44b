"""What a step asks of an engine: the batch, its packed tokens, one row's state. Plain data, made by `rows.RowTable`."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from protos.common.v1 import common_pb2

IntArray = NDArray[np.int32]
BoolArray = NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class RowWork:
    """One row's share of a step: `num_tokens` tokens from `start` on; `samples`: the last known token is among them."""

    row: int
    start: int
    num_tokens: int
    samples: bool


@dataclass(frozen=True, slots=True)
class RowState:
    """What the worker knows of one row; a copy for people, spans and tests, engines read the columns."""

    row: int
    incarnation: int
    name: str
    token_ids: list[int]
    block_ids: list[int]
    num_prompt_tokens: int
    num_computed_tokens: int
    temperature: float
    top_p: float
    top_k: int
    seed: int
    sequence_index: int
    logprobs: bool
    repeats: bool
    trace: common_pb2.TraceContext | None


@dataclass(frozen=True, slots=True)
class StepBatch:
    """What one step, or one further decode step of it, has to compute; rows ascending, arrays of equal length n.

    known tokens  |---- computed ----|------- counts -------|---- later ----|
                  0                start               start + count      known
    """

    rows: IntArray
    starts: IntArray
    counts: IntArray
    samples: BoolArray
    num_decode_steps: int
    updated_rows: IntArray
    """Rows that joined or whose block table grew: what a device mirror has to copy."""
    swap_in: IntArray
    """[m, 2]: (host block, device block)."""
    swap_out: IntArray
    """[m, 2]: (device block, host block)."""
    copies: IntArray
    """[m, 2]: (source, destination) device blocks."""

    @property
    def sampled_rows(self) -> IntArray:
        """Rows that yield a token, in batch order."""
        return self.rows[self.samples]

    @property
    def num_tokens(self) -> int:
        """Tokens to compute."""
        return int(self.counts.sum())

    def works(self) -> Iterator[RowWork]:
        """The same, row by row."""
        columns = (self.rows.tolist(), self.starts.tolist(), self.counts.tolist(), self.samples.tolist())
        return (RowWork(*work) for work in zip(*columns, strict=True))


@dataclass(frozen=True, slots=True)
class PackedTokens:
    """All tokens of a batch in one row of length T, row after row."""

    token_ids: IntArray
    """[T]."""
    positions: IntArray
    """[T]: offset of each within its sequence."""
    token_rows: IntArray
    """[T]: row index of each."""
    slots: NDArray[np.int64]
    """[T]: where its KV goes: block id * block size + offset."""
    row_offsets: IntArray
    """[n + 1]: tokens of batch row i are `row_offsets[i] : row_offsets[i + 1]`."""
    sampled_at: IntArray
    """[number of sampling rows]: index into T of each row's last known token."""
