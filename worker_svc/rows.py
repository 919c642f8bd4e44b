"""The persistent batch (design.md 6): row state that lives on the worker and is changed by the deltas of each step.

`RowTable` keeps one column per property, indexed by row, so that a step of n rows costs a few numpy calls and no Python loop over
rows. A step is first decided (`row_changes.py`, `row_checks.py`: nothing is touched), then applied: a bad step changes
nothing. No torch, no grpc: engines read the columns as they are or mirror them on their device.
"""

import numpy as np

from protos.worker.v1 import worker_pb2
from worker_svc import row_checks
from worker_svc.row_batch import BoolArray, IntArray, PackedTokens, RowState, RowWork, StepBatch
from worker_svc.row_changes import Limits, StepChanges, read_step
from worker_svc.row_columns import RowColumns

__all__ = ["Limits", "PackedTokens", "RowState", "RowTable", "RowWork", "StepBatch"]


class RowTable(RowColumns):
    """Owns the rows of one engine. All columns may be read by the engine; only this class writes them.

    Cycle of a step: `apply`, compute, then `commit` (again for each `next_decode`), or `void` if computing failed.
    """

    def __init__(self, limits: Limits) -> None:
        super().__init__(limits)
        self._open: StepBatch | None = None

    # --- a step ------------------------------------------------------------------------------------------------------

    def apply(self, outputs: worker_pb2.SchedulerOutputs) -> StepBatch:
        """Takes in a step's deltas and says what to compute. InvalidArgument, naming the field: nothing has changed."""
        assert self._open is None, "commit or void the last batch first"
        step = read_step(outputs, self.limits)
        if step.is_steady:
            batch = self._steady(step)
        else:
            row_checks.check_changes(self, step)
            batch = self._batch(step, *self._counts(step))
        row_checks.check_room(self, batch, step)
        self.write(step)
        self._open = batch
        return batch

    def commit(self, batch: StepBatch, token_ids: IntArray, finite: BoolArray | None = None) -> None:
        """The batch is computed: `token_ids` [number of sampling rows] in batch order are appended.

        Rows that are not `finite` [same length] get no token and compute nothing until they are removed.
        """
        assert self._open is batch, "only the batch applied last can be committed"
        self._open = None
        rows = batch.sampled_rows
        self.num_computed[batch.rows] += batch.counts
        self.repeats[batch.rows] = False
        if finite is not None:
            self.failed[rows[~finite]] = True
            rows, token_ids = rows[finite], token_ids[finite]
        if not len(rows):
            return
        known = self.num_known[rows]
        self.need_tokens(int(known.max()) + 1)
        self.token_ids[rows, known] = token_ids
        self.num_known[rows] = known + 1
        self.repeats[rows] = True

    def next_decode(self, batch: StepBatch) -> StepBatch:
        """The next decode step of a multi-step message: the rows of `batch`, already committed, that got a token."""
        assert self._open is None, "commit the last decode step first"
        rows = batch.sampled_rows
        rows = rows[self.repeats[rows]]
        none = np.zeros((0, 2), np.int32)
        ones = np.ones(len(rows), np.int32)
        self._open = StepBatch(
            rows, self.num_computed[rows], ones, ones.astype(np.bool_), 1, rows[:0], none, none, none
        )
        return self._open

    def void(self, batch: StepBatch) -> None:
        """Computing the batch failed: its rows keep their counts and compute nothing until mentioned or removed."""
        assert self._open is batch, "only the batch applied last can be voided"
        self._open = None
        self.repeats[batch.rows] = False

    def reset(self) -> None:
        """Forgets all rows and their incarnations."""
        self.clear()
        self._open = None

    def pack(self, batch: StepBatch) -> PackedTokens:
        """The batch's tokens with positions and cache slots, in one row."""
        offsets = np.zeros(len(batch.rows) + 1, np.int32)
        np.cumsum(batch.counts, out=offsets[1:])
        rows = np.repeat(batch.rows, batch.counts)
        shift = np.repeat(batch.starts - offsets[:-1], batch.counts)
        positions = np.arange(len(rows), dtype=np.int32) + shift
        size = self.limits.block_size
        blocks = self.block_tables[rows, positions // size].astype(np.int64)
        slots = blocks * size + positions % size
        sampled_at = offsets[1:][batch.samples] - 1
        return PackedTokens(self.token_ids[rows, positions], positions, rows, slots, offsets, sampled_at)

    # --- deciding: reads only ----------------------------------------------------------------------------------------

    def _steady(self, step: StepChanges) -> StepBatch:
        rows = np.flatnonzero(self.repeats).astype(np.int32)
        ones = np.ones(len(rows), np.int32)
        return self._make(step, rows, self.num_computed[rows], ones, ones.astype(np.bool_))

    def _counts(self, step: StepChanges) -> tuple[IntArray, IntArray, IntArray]:
        """Tokens to compute, known and computed tokens as the step will have them, by row."""
        num_rows = max(len(self.occupied), step.num_rows)
        counts, known, computed = (np.zeros(num_rows, np.int32) for _ in range(3))
        here = len(self.occupied)
        counts[:here], known[:here], computed[:here] = self.repeats, self.num_known, self.num_computed
        counts[step.removed] = 0
        if step.added is not None:
            counts[step.added.rows] = step.added.num_tokens
            known[step.added.rows] = step.added.num_known
            computed[step.added.rows] = step.added.num_computed
        if step.changed is not None:
            alive = ~self.failed[step.changed.rows]
            counts[step.changed.rows] = step.changed.num_tokens * alive
        return counts, known, computed

    def _batch(self, step: StepChanges, counts: IntArray, known: IntArray, computed: IntArray) -> StepBatch:
        rows = np.flatnonzero(counts).astype(np.int32)
        starts, num_tokens = computed[rows], counts[rows]
        return self._make(step, rows, starts, num_tokens, starts + num_tokens == known[rows])

    def _make(
        self, step: StepChanges, rows: IntArray, starts: IntArray, counts: IntArray, samples: BoolArray
    ) -> StepBatch:
        return StepBatch(
            rows=rows,
            starts=starts,
            counts=counts,
            samples=samples,
            num_decode_steps=step.num_decode_steps,
            updated_rows=step.updated_rows,
            swap_in=step.swap_in,
            swap_out=step.swap_out,
            copies=step.copies,
        )
