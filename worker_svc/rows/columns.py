"""Row state as one numpy column per property, and how a step is written into it. Rules and checks are elsewhere."""

from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from protos.common.v1 import common_pb2
from worker_svc.rows.batch import IntArray, RowState
from worker_svc.rows.changes import Additions, ChangeLimits, Changes, StepChanges
from worker_svc.rows.options import OptionColumns

_Int = TypeVar("_Int", np.int32, np.int64)
_FIRST_ROWS, _FIRST_TOKENS, _FIRST_BLOCKS = 64, 256, 16
_COLUMNS = (
    "occupied", "num_known", "num_prompt", "num_computed", "num_blocks", "repeats", "failed", "temperatures", "top_ps", "top_ks",
    "seeds", "sequence_indexes", "logprobs", "num_unread", "token_ids", "_num_copied", "state_blocks",
)  # fmt: skip


class RowColumns:
    """Row state by row index.

    Values of rows that are not `occupied` are stale; only `rows.RowTable` calls the writing methods.

    Growing replaces the arrays, so read them anew for each step.
    """

    def __init__(self, limits: ChangeLimits) -> None:
        self.limits = limits
        self.clear()

    def clear(self) -> None:
        """Remove all rows and incarnations."""
        n = _FIRST_ROWS
        self.occupied = np.zeros(n, np.bool_)
        self.incarnations = np.full(n, -1, np.int32)
        self.num_known = np.zeros(n, np.int32)
        self.num_prompt = np.zeros(n, np.int32)
        self.num_computed = np.zeros(n, np.int32)
        self.num_blocks = np.zeros(n, np.int32)
        # Of them, those that a copy elsewhere has, see `new_blocks`.
        self._num_copied = np.zeros(n, np.int32)
        # Computes one token in the next step that does not mention the row: decoding and not paused.
        self.repeats = np.zeros(n, np.bool_)
        # Got no token because of its logits or its grammar: computes nothing more, even if a step in flight
        # mentions it.
        self.failed = np.zeros(n, np.bool_)
        self.temperatures = np.zeros(n, np.float32)
        self.top_ps = np.ones(n, np.float32)
        self.top_ks = np.zeros(n, np.int32)
        self.seeds = np.zeros(n, np.uint64)
        self.sequence_indexes = np.zeros(n, np.int32)
        self.logprobs = np.zeros(n, np.bool_)
        # Number of known tokens, at the end, that were drawn but are not on the host yet; 0 stands in place
        # of their ids.
        self.num_unread = np.zeros(n, np.int32)
        self.token_ids = np.zeros((n, _FIRST_TOKENS), np.int32)
        # Of each cache group.
        self.block_tables = np.zeros((self.limits.num_groups, n, _FIRST_BLOCKS), np.int32)
        self.state_blocks = np.zeros((n, self.limits.num_state_blocks), np.int32)
        self.options = OptionColumns.defaults(n)
        self.names = [""] * n
        self.traces: list[common_pb2.TraceContext | None] = [None] * n

    def row(self, row: int) -> RowState:
        """A copy of one row's state; raises KeyError if the row is not in use."""
        if not (0 <= row < len(self.occupied) and self.occupied[row]):
            raise KeyError(row)
        return RowState(
            row=row,
            incarnation=int(self.incarnations[row]),
            name=self.names[row],
            token_ids=self.token_ids[row, : self.num_known[row]].tolist(),
            block_ids=[
                *self.state_blocks[row].tolist(),
                *self.block_tables[:, row, : self.num_blocks[row]].T.reshape(-1).tolist(),
            ],
            num_prompt_tokens=int(self.num_prompt[row]),
            num_computed_tokens=int(self.num_computed[row]),
            temperature=float(self.temperatures[row]),
            top_p=float(self.top_ps[row]),
            top_k=int(self.top_ks[row]),
            seed=int(self.seeds[row]),
            sequence_index=int(self.sequence_indexes[row]),
            logprobs=bool(self.logprobs[row]),
            repeats=bool(self.repeats[row]),
            trace=self.traces[row],
        )

    def occupied_rows(self) -> IntArray:
        """Indexes in use, ascending."""
        return np.flatnonzero(self.occupied).astype(np.int32)

    def new_blocks(self) -> tuple[IntArray, NDArray[np.int64]]:
        """Rows and places in `block_tables` that were written since `copied_blocks`, for a copy of them elsewhere."""
        rows = np.flatnonzero(self.occupied & (self._num_copied < self.num_blocks)).astype(np.int32)
        return runs_after(rows, self._num_copied[rows], self.num_blocks[rows] - self._num_copied[rows])

    def copied_blocks(self) -> None:
        """The copy has all blocks of the rows in use."""
        self._num_copied[self.occupied] = self.num_blocks[self.occupied]

    # --- writing: cannot fail ----------------------------------------------------------------------------------------

    def write(self, step: StepChanges) -> None:
        """Write a checked step: removed, then added, then changed rows."""
        for row in step.removed.tolist():
            self.occupied[row] = False
            self.repeats[row] = False
            self.names[row], self.traces[row], self.options.extras[row] = "", None, None
        if step.added is not None:
            self._write_added(step.added)
        if step.changed is not None:
            self._write_changed(step.changed)

    def _write_added(self, added: Additions) -> None:
        self._need_rows(int(added.rows.max()) + 1)
        self.need_tokens(int(added.num_known.max()))
        self._need_blocks(int(added.num_blocks.max()))
        rows = added.rows
        self.occupied[rows] = True
        self.repeats[rows] = self.failed[rows] = False
        self.incarnations[rows] = added.incarnations
        self.num_known[rows], self.num_prompt[rows] = added.num_known, added.num_prompt
        self.num_computed[rows], self.num_blocks[rows] = added.num_computed, added.num_blocks
        self._num_copied[rows] = 0
        self.temperatures[rows], self.top_ps[rows], self.top_ks[rows] = added.temperatures, added.top_ps, added.top_ks
        self.seeds[rows], self.sequence_indexes[rows] = added.seeds, added.sequence_indexes
        self.logprobs[rows] = added.logprobs
        self.num_unread[rows] = 0
        self.options.put(rows, added.options)
        num_of_states = self.limits.num_state_blocks
        for i, row in enumerate(rows.tolist()):
            of_states, of_keys = added.block_ids[i][:num_of_states], added.block_ids[i][num_of_states:]
            self.state_blocks[row] = of_states
            self.token_ids[row, : added.num_known[i]] = added.token_ids[i]
            self.block_tables[:, row, : added.num_blocks[i]] = self._by_group(of_keys)
            self.names[row] = added.names[i]
            self.traces[row] = added.traces[i] if added.traces else None

    def _write_changed(self, changed: Changes) -> None:
        rows = changed.rows
        # Committing this step decides whether the row repeats in steps that do not mention it.
        self.repeats[rows] = False
        self._need_blocks(int((self.num_blocks[rows] + changed.num_new_blocks).max()))
        grown, places = runs_after(rows, self.num_blocks[rows], changed.num_new_blocks)
        self.block_tables[:, grown, places] = self._by_group(changed.new_block_ids)
        self.num_blocks[rows] += changed.num_new_blocks
        if len(changed.new_token_ids):
            self.append_tokens(rows, changed.num_new_tokens, changed.new_token_ids)

    def _by_group(self, block_ids: IntArray) -> IntArray:
        """[cache groups, places] of the ids of some places in order."""
        return block_ids.reshape(-1, self.limits.num_groups).T

    def append_tokens(self, rows: IntArray, counts: IntArray, token_ids: IntArray) -> None:
        """Append `counts` [n] known tokens to distinct `rows` [n]; `token_ids` [sum of counts]."""
        known = self.num_known[rows]
        self.need_tokens(int((known + counts).max()))
        grown, places = runs_after(rows, known, counts)
        self.token_ids[grown, places] = token_ids
        self.num_known[rows] = known + counts

    # --- growing -----------------------------------------------------------------------------------------------------

    def _need_rows(self, num_rows: int) -> None:
        here = len(self.occupied)
        if num_rows <= here:
            return
        more = max(num_rows, 2 * here) - here
        for name in _COLUMNS:
            setattr(self, name, _longer(getattr(self, name), more))
        groups, _, width = self.block_tables.shape
        self.block_tables = np.concatenate([self.block_tables, np.zeros((groups, more, width), np.int32)], axis=1)
        self.incarnations = np.concatenate([self.incarnations, np.full(more, -1, np.int32)])
        self.options.grow(more)
        self.names.extend([""] * more)
        self.traces.extend([None] * more)

    def need_tokens(self, width: int) -> None:
        """Make room for sequences of `width` tokens."""
        if width > self.token_ids.shape[1]:
            self.token_ids = _wider(self.token_ids, width)

    def _need_blocks(self, width: int) -> None:
        if width > self.block_tables.shape[2]:
            self.block_tables = _wider(self.block_tables, width)


def runs_after(
    rows: NDArray[_Int], ends: NDArray[Any], counts: NDArray[Any]
) -> tuple[NDArray[_Int], NDArray[np.int64]]:
    """Row and position of each of the `counts[i]` elements that follow the first `ends[i]` elements of `rows[i]`."""
    first = np.cumsum(counts) - counts
    shift = np.repeat(ends - first, counts)
    return np.repeat(rows, counts), np.arange(len(shift)) + shift


def _longer(column: NDArray[Any], more: int) -> NDArray[Any]:
    grown = np.zeros((len(column) + more, *column.shape[1:]), column.dtype)
    grown[: len(column)] = column
    return grown


def _wider(matrix: IntArray, width: int) -> IntArray:
    before = matrix.shape[-1]
    grown = np.zeros((*matrix.shape[:-1], max(width, 2 * before)), np.int32)
    grown[..., :before] = matrix
    return grown
