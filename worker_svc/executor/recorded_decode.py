"""Decode steps by one launch from what the device keeps of its rows to their next tokens (`model/fused/recorded_steps`).

The device keeps each row's next token, its position and its blocks. Only what it cannot know goes up: rows that came or left,
rows that another kind of step has moved on, and new blocks. A step of which all rows are greedy or drawn without further rules
has its tokens chosen by that launch; of others only the logits are used. The rest is the step runner's.
"""

import numpy as np
import torch

from worker_svc.device.kept_inputs import BlockTables, LastTokens
from worker_svc.device.queue import DeviceQueue
from worker_svc.model.fused.recorded_steps import RecordedSteps
from worker_svc.rows.batch import IntArray, StepBatch
from worker_svc.rows.changes import StepChanges
from worker_svc.rows.table import RowTable
from worker_svc.sampling import prompt_scores

_UNKNOWN = -1


class RecordedDecode:
    """Owner of what the host knows of `steps.kept`. Call `follow` with each step's changes, then `takes` and `run`."""

    def __init__(
        self, steps: RecordedSteps, table: RowTable, queue: DeviceQueue, tables: BlockTables, last_tokens: LastTokens
    ) -> None:
        self._steps, self._table, self._queue = steps, table, queue
        self._tables, self._last_tokens = tables, last_tokens
        # Per row, the position of the token that the device would compute next.
        self._positions = np.full(len(steps.kept.positions), _UNKNOWN, np.int32)
        self._rows: IntArray | None = None

    def clear(self) -> None:
        """Forget all rows."""
        self._positions[:] = _UNKNOWN
        self._rows = None

    def follow(self, changes: StepChanges) -> None:
        """Forget rows that are others now, or were given tokens that the device has not chosen."""
        if changes.added is not None:
            self._forget(changes.added.rows)
        if changes.changed is not None and len(changes.changed.new_token_ids):
            self._forget(changes.changed.rows[changes.changed.num_new_tokens > 0])

    def _forget(self, rows: IntArray) -> None:
        self._positions[rows[rows < len(self._positions)]] = _UNKNOWN
        self._rows = None

    def takes(self, batch: StepBatch) -> bool:
        """True for a step in which each row computes its next token, and the model is all that is asked for."""
        rows, options = batch.rows, self._table.options
        return (
            0 < len(rows) <= self._steps.most_rows
            and int(rows.max()) < len(self._positions)
            and bool(batch.samples.all() and (batch.counts == 1).all())
            and not (batch.num_drafts.any() or options.adapter_ids[rows].any() or options.tasks[rows].any())
            and (batch.changes.is_unchanged or not prompt_scores.wanting_rows(self._table, batch).any())
        )

    def run(self, batch: StepBatch) -> torch.Tensor | None:
        """Logits, float32 [rows, vocab], valid until the next step; None if the device keeps too little. Inside `inputs`."""
        kept = self._steps.kept
        if self._tables.now() is not kept.block_tables or self._last_tokens.ids is not kept.token_ids:
            return None  # rows or blocks beyond those kept were seen
        self._bring_up(batch.rows, batch.starts)
        self._positions[batch.rows] = _UNKNOWN  # if this fails
        self._steps.run(len(batch.rows))
        self._positions[batch.rows] = batch.starts + 1
        return self._steps.logits(len(batch.rows))

    def chosen(self, num_rows: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Tokens int64 and finite rows bool, [num_rows], of the last `run`; copies."""
        return self._steps.chosen(num_rows)

    def _bring_up(self, rows: IntArray, starts: IntArray) -> None:
        stale = np.flatnonzero(self._positions[rows] != starts)
        if len(stale):
            self._send_positions(rows[stale], starts[stale])
        if self._rows is None or not np.array_equal(self._rows, rows):
            self._send_columns(rows)
            self._rows = rows.copy()

    def _send_positions(self, rows: IntArray, starts: IntArray) -> None:
        """Positions, and tokens that the host knows; the device has drawn the others."""
        table, kept = self._table, self._steps.kept
        known = table.num_unread[rows] == 0
        tokens = table.token_ids[rows[known], starts[known]]
        at, positions, of, ids = self._queue.upload(
            rows.astype(np.int64), starts, rows[known].astype(np.int64), tokens.astype(np.int64)
        )
        kept.positions.index_copy_(0, at, positions)
        if known.any():
            kept.token_ids.index_copy_(0, of, ids)

    def _send_columns(self, rows: IntArray) -> None:
        table, columns = self._table, self._steps.columns
        [memory] = self._queue.upload(
            columns.packed(
                rows=rows,
                temperatures=table.temperatures[rows],
                top_ks=table.top_ks[rows],
                top_ps=table.top_ps[rows],
                min_ps=table.options.min_ps[rows],
                seeds=table.seeds[rows].view(np.int64),
                sequence_indexes=table.sequence_indexes[rows],
            )
        )
        columns.memory.copy_(memory)
