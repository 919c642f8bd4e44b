"""The persistent batch: row state that stays on the worker and is changed by the deltas of each step.

`RowTable` keeps one column per property, indexed by row, so that a step of n rows costs a few numpy calls
and no Python loop over rows. A step is fully checked before it is applied (`changes.py`, `checks.py`), so
an invalid step changes nothing. The module uses neither torch nor grpc: engines read the columns directly
or mirror them on their device.
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from protos.worker.v1 import worker_pb2
from worker_svc.rows import checks as row_checks
from worker_svc.rows.batch import BoolArray, IntArray, PackedTokens, Promise, RowShares, RowState, RowWork, StepBatch
from worker_svc.rows.changes import ChangeLimits, StepChanges, read_step
from worker_svc.rows.columns import RowColumns, runs_after
from worker_svc.rows.options import Guard
from worker_svc.rows.states import RowStates, StateEnds

__all__ = ["ChangeLimits", "PackedTokens", "Promise", "RowState", "RowTable", "RowWork", "StepBatch"]


class RowTable(RowColumns):
    """Owns the rows of one engine. The engine may read all columns; only this class writes them.

    Cycle of a step: `apply`, compute, then `commit` (once per `next_decode`), or `void` if computing
    failed. If tokens will be known only later, call `promise` instead of `commit`, then `keep` when they
    are known.
    """

    def __init__(self, limits: ChangeLimits) -> None:
        super().__init__(limits)
        self._open: StepBatch | None = None
        self._guards: list[Guard] = []

    def guard(self, check: Guard) -> None:
        """Register a check of added rows for what the table does not know, such as tasks and adapters."""
        self._guards.append(check)

    # --- a step ------------------------------------------------------------------------------------------------------

    def apply(self, outputs: worker_pb2.SchedulerOutputs) -> StepBatch:
        """Apply a step's deltas and return its batch. Raises InvalidArgument naming the field, with nothing changed."""
        assert self._open is None, "commit or void the last batch first"
        step = read_step(outputs, self.limits)
        if step.is_unchanged:
            batch = self._decoding(step, np.flatnonzero(self.repeats).astype(np.int32))
        else:
            self._check(step)
            batch = self._shares(step).batch(step)
        row_checks.check_room(self, batch, step)
        batch = row_checks.with_checked_states(self, batch, step)
        if not step.is_unchanged:
            self.write(step)
        self._open = batch
        return batch

    def commit(
        self, batch: StepBatch, token_ids: IntArray, finite: BoolArray | None = None, counts: IntArray | None = None
    ) -> None:
        """Commit a computed batch, given the tokens of its sampling rows.

        Each sampling row yielded `counts` tokens (None = 1 each, those not `finite` included); `token_ids`
        [sum of counts] is in batch order. A row with draft tokens continues after the last of its tokens, one
        with children after its first. Rows not `finite` [number of sampling rows] get no token and compute
        nothing until they are removed.
        """
        assert self._open is batch, "only the batch applied last can be committed"
        self._open = None
        rows = batch.sampled_rows
        counts = np.ones(len(rows), np.int32) if counts is None else counts
        finite = np.ones(len(rows), np.bool_) if finite is None else finite
        self.num_computed[batch.rows] += batch.counts
        self.repeats[batch.rows] = False
        self.failed[rows[~finite]] = True
        kept = np.repeat(finite, counts)
        self._take(rows[finite], counts[finite], token_ids[kept], batch.sampled_drafts[finite])

    def _take(self, rows: IntArray, counts: IntArray, token_ids: IntArray, num_drafts: IntArray) -> None:
        """Append the tokens of rows that yielded some. Beams yield none: the scheduler sends theirs."""
        has_children = self.options.num_children[rows] > 1
        if has_children.any():
            first = np.repeat(np.cumsum(counts) - counts, counts)
            goes_on = ~np.repeat(has_children, counts) | (np.arange(len(first)) == first)
            self.options.num_children[rows] = 1
            counts, token_ids = np.where(has_children, 1, counts), token_ids[goes_on]
        # Draft tokens after the last accepted one were rejected: their KV does not count as computed.
        self.num_computed[rows] -= np.where(num_drafts > 0, num_drafts + 1 - counts, 0)
        self.repeats[rows] = counts > 0
        if len(token_ids):
            self.append_tokens(rows, counts, token_ids)

    def promise(self, batch: StepBatch) -> Promise:
        """Reserve one token, known later, for each sampling row of a batch being computed; beams get none.

        Not for batches with draft tokens: the number of accepted ones is not known yet.
        """
        assert self._open is batch, "only tokens of the batch applied last can be reserved"
        self._open = None
        alive = ~self.failed[batch.rows]
        self.num_computed[batch.rows] += batch.counts * alive
        self.repeats[batch.rows] = False
        rows = batch.rows[batch.samples & alive]
        rows = rows[self.options.num_candidates[rows] == 0]
        promise = Promise(rows, self.incarnations[rows], self.num_known[rows])
        if len(rows):
            self.options.num_children[rows] = 1
            self.repeats[rows] = True
            self.num_unread[rows] += 1
            self.append_tokens(rows, np.ones(len(rows), np.int32), np.zeros(len(rows), np.int32))
        return promise

    def keep(self, promise: Promise, token_ids: IntArray, finite: BoolArray) -> None:
        """Fill in reserved tokens [n], oldest promise first.

        A row not `finite` [n] got no token, and none in later steps.

        Rows of an ended incarnation and rows that had failed are skipped.
        """
        rows, places = promise.rows, promise.places
        here = self.is_alive(rows, promise.incarnations)
        kept, broken = here & finite, here & ~finite
        self.token_ids[rows[kept], places[kept]] = token_ids[kept]
        self.num_unread[rows[kept]] -= 1
        self.num_known[rows[broken]] = self.num_computed[rows[broken]] = places[broken]
        self.num_unread[rows[broken]] = 0
        self.fail(rows[broken])

    def is_alive(self, rows: IntArray, incarnations: IntArray) -> BoolArray:
        """[n]: True for those of `rows` still in incarnation `incarnations` and not failed."""
        return self.occupied[rows] & (self.incarnations[rows] == incarnations) & ~self.failed[rows]

    def fail(self, rows: IntArray) -> None:
        """Mark `rows` as failed: they compute nothing until they are removed."""
        self.failed[rows] = True
        self.repeats[rows] = False

    def next_decode(self, batch: StepBatch) -> StepBatch:
        """The next decode step of a multi-step message: the rows of `batch`, already committed, that got a token."""
        assert self._open is None, "commit the last decode step first"
        rows = batch.sampled_rows
        self._open = self._decoding(batch.changes.further(), rows[self.repeats[rows]])
        return self._open

    def drafted(self, batch: StepBatch, drafts: Sequence[IntArray]) -> StepBatch:
        """Add draft tokens to the batch applied last.

        `drafts[i]` goes to the i-th row with `num_drafts`, in batch order. A row with fewer draft tokens than
        planned computes fewer tokens.
        """
        assert self._open is batch, "only the batch applied last can get drafts"
        guessed = np.flatnonzero(batch.num_drafts)
        rows = batch.rows[guessed]
        num_drafts = batch.num_drafts.copy()
        num_drafts[guessed] = [len(run) for run in drafts]
        assert (num_drafts <= batch.num_drafts).all(), "a proposer returns at most the requested number of draft tokens"
        self.need_tokens(int((self.num_known[rows] + num_drafts[guessed]).max()))
        grown, places = runs_after(rows, self.num_known[rows], num_drafts[guessed])
        self.token_ids[grown, places] = np.concatenate(drafts)
        self._open = replace(batch, num_drafts=num_drafts, counts=batch.counts - batch.num_drafts + num_drafts)
        return self._open

    def num_repetitions(self, rows: IntArray) -> int:
        """How often `rows`, which repeat, may compute a token without a check of room and without growth of columns."""
        ends = np.minimum(self.num_blocks[rows] * self.limits.block_size, self.limits.max_model_len)
        ends = np.minimum(ends, self.token_ids.shape[1] - 1)
        return max(0, int((ends - self.num_computed[rows]).min()))

    def repeat(self, rows: IntArray, token_ids: IntArray) -> None:
        """Apply and commit an empty step whose rows, all that repeat, drew `token_ids` [n]; see `num_repetitions`."""
        assert self._open is None, "commit or void the last batch first"
        known = self.num_known[rows]
        self.token_ids[rows, known] = token_ids
        self.num_computed[rows] = known
        self.num_known[rows] = known + 1

    def void(self, batch: StepBatch) -> None:
        """Abandon a batch that failed to compute.

        Its rows keep their counts and compute nothing until mentioned or removed.
        """
        assert self._open is batch, "only the batch applied last can be voided"
        self._open = None
        self.repeats[batch.rows] = False

    def reset(self) -> None:
        """Remove all rows and their incarnations."""
        self.clear()
        self._open = None

    def pack(self, batch: StepBatch) -> PackedTokens:
        """The batch's tokens with positions and cache slots, concatenated."""
        offsets = np.zeros(len(batch.rows) + 1, np.int32)
        np.cumsum(batch.counts, out=offsets[1:])
        rows = np.repeat(batch.rows, batch.counts)
        shift = np.repeat(batch.starts - offsets[:-1], batch.counts)
        positions = np.arange(len(rows), dtype=np.int32) + shift
        size = self.limits.block_size
        blocks = self.block_tables[:, rows, positions // size].astype(np.int64)
        slots = blocks * size + positions % size
        last_known = offsets[1:][batch.samples] - 1 - batch.sampled_drafts
        _, sampled_at = runs_after(batch.sampled_rows, last_known, batch.sampled_drafts + 1)
        adapters = self.options.adapter_ids[rows]
        token_ids = self.token_ids[rows, positions]
        return PackedTokens(
            token_ids,
            positions,
            rows,
            slots,
            offsets,
            sampled_at,
            adapters if adapters.any() else None,
            self._unread(batch, rows, positions),
            self._states(batch),
        )

    def _states(self, batch: StepBatch) -> RowStates | None:
        if not self.limits.num_state_blocks:
            return None
        sure = batch.starts + batch.counts - batch.num_drafts
        ends = StateEnds(*runs_after(np.arange(len(batch.rows), dtype=np.int32), sure, batch.num_drafts))
        return RowStates.of(batch.rows, batch.starts, self.state_blocks[batch.rows], batch.changes.states, ends)

    def _unread(self, batch: StepBatch, rows: IntArray, positions: IntArray) -> NDArray[np.int64] | None:
        """Indices of tokens that the host does not know. A row computes at most one: the token it drew last."""
        if not self.num_unread[batch.rows].any():
            return None
        return np.flatnonzero(positions >= (self.num_known - self.num_unread)[rows])

    # --- deciding: reads only ----------------------------------------------------------------------------------------

    def _check(self, step: StepChanges) -> None:
        row_checks.check_changes(self, step)
        if step.added is not None:
            for check in self._guards:
                check(step.added.rows, step.added.num_computed, step.added.options)

    def _decoding(self, step: StepChanges, rows: IntArray) -> StepBatch:
        """A batch in which `rows` compute one token each."""
        ones = np.ones(len(rows), np.int32)
        reaches = ones.astype(np.bool_)
        return StepBatch(
            rows, self.num_computed[rows], ones, reaches, reaches, np.zeros_like(ones), step.num_decode_steps, step
        )

    def _shares(self, step: StepChanges) -> RowShares:
        """The work of each row, with its state after the step's changes."""
        shares = RowShares.zeros(max(len(self.occupied), step.num_rows))
        here = slice(0, len(self.occupied))
        shares.counts[here], shares.known[here] = self.repeats, self.num_known
        shares.computed[here], shares.tasks[here] = self.num_computed, self.options.tasks
        shares.counts[step.removed] = 0
        if step.added is not None:
            shares.add(step.added)
        if step.changed is not None:
            shares.change(step.changed, ~self.failed[step.changed.rows])
        return shares
