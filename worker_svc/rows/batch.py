"""Plain data of a step for the engine: the batch, its packed tokens, a row's state. Built by `rows.RowTable`."""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from protos.common.v1 import common_pb2
from worker_svc.rows.changes import Additions, Changes, IntArray, StepChanges
from worker_svc.rows.states import RowStates

BoolArray = NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class RowWork:
    """One row's share of a step: `num_tokens` tokens from position `start`.

    `samples`: the row yields tokens or candidates.
    """

    row: int
    start: int
    num_tokens: int
    samples: bool


@dataclass(frozen=True, slots=True)
class RowState:
    """A copy of one row's state, for display, spans and tests; engines read the columns."""

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
    """The work of one step or of one further decode step; rows ascending, arrays of equal length n.

    known tokens  |---- computed ----|------- counts -------|---- later ----|
                  0                start               start + count      known

    with drafts   |---- computed ----|-- known --|-- drafts --|
                  0                start       known     start + count
    """

    rows: IntArray
    starts: IntArray
    counts: IntArray
    """Tokens to compute, draft tokens included."""
    reaches_end: BoolArray
    """True if the last known token is computed."""
    samples: BoolArray
    """True if the last known token is computed and the row yields tokens or candidates rather than an embedding."""
    num_drafts: IntArray
    """Number of draft tokens, which are the last of `counts`."""
    num_decode_steps: int
    changes: StepChanges
    """The step's changes to rows and blocks; empty for its further decode steps."""
    sampled_rows: IntArray = field(init=False)
    """Rows that sample, in batch order."""
    sampled_drafts: IntArray = field(init=False)
    """`num_drafts` of the rows that sample."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "sampled_rows", self.rows[self.samples])
        object.__setattr__(self, "sampled_drafts", self.num_drafts[self.samples])

    @property
    def num_tokens(self) -> int:
        """Total tokens to compute."""
        return int(self.counts.sum())

    def part(self, chosen: BoolArray) -> "StepBatch":
        """The batch restricted to chosen rows; `chosen` [n]."""
        columns = ("rows", "starts", "counts", "reaches_end", "samples", "num_drafts")
        return replace(self, **{name: getattr(self, name)[chosen] for name in columns})

    def works(self) -> Iterator[RowWork]:
        """The batch row by row."""
        columns = (self.rows.tolist(), self.starts.tolist(), self.counts.tolist(), self.samples.tolist())
        return (RowWork(*work) for work in zip(*columns, strict=True))


@dataclass(frozen=True, slots=True)
class RowShares:
    """Per row index, the work that a step requests and the row's state after the step's changes. Built for one step."""

    counts: IntArray
    num_drafts: IntArray
    known: IntArray
    computed: IntArray
    tasks: IntArray

    @classmethod
    def zeros(cls, num_rows: int) -> "RowShares":
        """Shares of `num_rows` rows without work."""
        return cls(*(np.zeros(num_rows, np.int32) for _ in range(5)))

    def add(self, added: Additions) -> None:
        """Include added rows."""
        self.counts[added.rows] = added.num_tokens
        self.known[added.rows] = added.num_known
        self.computed[added.rows] = added.num_computed
        self.tasks[added.rows] = added.options.tasks

    def change(self, changed: Changes, alive: BoolArray) -> None:
        """Apply changes to existing rows; those not `alive` [n] compute nothing."""
        self.counts[changed.rows] = changed.num_tokens * alive
        self.num_drafts[changed.rows] = changed.num_drafts * alive
        self.known[changed.rows] += changed.num_new_tokens

    def batch(self, step: StepChanges) -> StepBatch:
        """The batch of all rows with work."""
        rows = np.flatnonzero(self.counts).astype(np.int32)
        starts, counts, num_drafts = self.computed[rows], self.counts[rows], self.num_drafts[rows]
        reaches_end = starts + counts - num_drafts == self.known[rows]
        samples = reaches_end & (self.tasks[rows] == common_pb2.TASK_UNSPECIFIED)
        return StepBatch(rows, starts, counts, reaches_end, samples, num_drafts, step.num_decode_steps, step)


@dataclass(frozen=True, slots=True)
class PackedTokens:
    """All tokens of a batch in one sequence of length T, row after row."""

    token_ids: IntArray
    """Token ids [T]."""
    positions: IntArray
    """[T]: position of each token in its sequence."""
    token_rows: IntArray
    """[T]: row index of each token."""
    slots: NDArray[np.int64]
    """[cache groups, T]: where the token's KV is stored: block id * block size + offset."""
    row_offsets: IntArray
    """[n + 1]: tokens of batch row i are `row_offsets[i] : row_offsets[i + 1]`."""
    sampled_at: IntArray
    """[number of places]: index into T of the tokens to sample after.

    These are the last known token of each sampling row and its draft tokens.
    """
    adapter_ids: IntArray | None = None
    """[T]: adapter of each token's row, 0 = none. None if no row of the batch has one."""
    unread: NDArray[np.int64] | None = None
    """[k]: index into T of tokens that were drawn last and are not yet known on the host. None if there are none."""
    states: RowStates | None = None
    """Of the batch's rows; None if the model has no states."""


@dataclass(frozen=True, slots=True)
class Promise:
    """One drawn token per row that the host does not know yet.

    `rows` [n] in incarnations `incarnations` [n]; the tokens' positions are `places` [n].
    """

    rows: IntArray
    incarnations: IntArray
    places: IntArray
