"""What a step asks of an engine: the batch, its packed tokens, one row's state. Plain data, made by `rows.RowTable`."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from protos.common.v1 import common_pb2
from worker_svc.rows.changes import Additions, Changes, IntArray, StepChanges

BoolArray = NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class RowWork:
    """One row's share of a step: `num_tokens` tokens from `start` on; `samples`: it yields tokens or candidates."""

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

    with drafts   |---- computed ----|-- known --|-- drafts --|
                  0                start       known     start + count
    """

    rows: IntArray
    starts: IntArray
    counts: IntArray
    """Tokens to compute, drafts included."""
    reaches_end: BoolArray
    """The last known token is among them."""
    samples: BoolArray
    """It is, and the row yields tokens or candidates: not a vector."""
    num_drafts: IntArray
    """How many of `counts`, the last ones, are guesses."""
    num_decode_steps: int
    changes: StepChanges
    """What the step did to rows and blocks before it; nothing for its further decode steps."""

    @property
    def sampled_rows(self) -> IntArray:
        """Rows that yield a token, in batch order."""
        return self.rows[self.samples]

    @property
    def num_tokens(self) -> int:
        """Tokens to compute."""
        return int(self.counts.sum())

    @property
    def sampled_drafts(self) -> IntArray:
        """`num_drafts` of the sampled rows."""
        return self.num_drafts[self.samples]

    def part(self, chosen: BoolArray) -> "StepBatch":
        """The same for some of its rows; `chosen` [n]."""
        columns = ("rows", "starts", "counts", "reaches_end", "samples", "num_drafts")
        return replace(self, **{name: getattr(self, name)[chosen] for name in columns})

    def works(self) -> Iterator[RowWork]:
        """The same, row by row."""
        columns = (self.rows.tolist(), self.starts.tolist(), self.counts.tolist(), self.samples.tolist())
        return (RowWork(*work) for work in zip(*columns, strict=True))


@dataclass(frozen=True, slots=True)
class RowShares:
    """By row index, what a step asks of each row and what the row will be when its changes are made; made for one step."""

    counts: IntArray
    num_drafts: IntArray
    known: IntArray
    computed: IntArray
    tasks: IntArray

    @classmethod
    def zeros(cls, num_rows: int) -> "RowShares":
        """Nothing to compute."""
        return cls(*(np.zeros(num_rows, np.int32) for _ in range(5)))

    def add(self, added: Additions) -> None:
        """Rows that join."""
        self.counts[added.rows] = added.num_tokens
        self.known[added.rows] = added.num_known
        self.computed[added.rows] = added.num_computed
        self.tasks[added.rows] = added.options.tasks

    def change(self, changed: Changes, alive: BoolArray) -> None:
        """Rows that stay; those not `alive` [n] compute nothing."""
        self.counts[changed.rows] = changed.num_tokens * alive
        self.num_drafts[changed.rows] = changed.num_drafts * alive
        self.known[changed.rows] += changed.num_new_tokens

    def batch(self, step: StepChanges) -> StepBatch:
        """Rows that compute something."""
        rows = np.flatnonzero(self.counts).astype(np.int32)
        starts, counts, num_drafts = self.computed[rows], self.counts[rows], self.num_drafts[rows]
        reaches_end = starts + counts - num_drafts == self.known[rows]
        samples = reaches_end & (self.tasks[rows] == common_pb2.TASK_UNSPECIFIED)
        return StepBatch(rows, starts, counts, reaches_end, samples, num_drafts, step.num_decode_steps, step)


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
    """[number of places]: index into T of tokens after which one may be drawn: each sampling row's last known and its drafts."""
    adapter_ids: IntArray | None = None
    """[T]: adapter of each token's row, 0 = none; None = no row of the batch has one."""
    unread: NDArray[np.int64] | None = None
    """[k]: index into T of tokens that their rows drew last and the host does not know yet; None = there is none."""


@dataclass(frozen=True, slots=True)
class Promise:
    """One token each that `rows` [n] drew in life `lives` [n] and the host does not know yet: token number `places` [n]."""

    rows: IntArray
    lives: IntArray
    places: IntArray
