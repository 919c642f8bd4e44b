"""Embeddings: pools the last hidden states of a prompt's tokens, chunk by chunk.

How a step uses it (`step_runner.py`):

  row with a pooling task is added  -> `check_added` before anything changes, then `Pools.open`
  `pools.wants(batch.rows)`         -> the step runs `RowModel.logits_and_hidden`, or `RowModel.hidden` if no row
                                       samples; otherwise `RowModel.logits`
  after the passes                  -> `pools.step(hidden, batch.rows, packed.row_offsets, batch.reaches_end)` returns the
                                       finished vectors, one WorkerOutputs.embeddings each, and forgets their rows
  rows are removed, a step is void  -> `Pools.forget`

Such a row does not sample: it has no entry in `sampled_at`.
"""

import numpy as np
import torch
from numpy.typing import NDArray

from protos.common.v1 import common_pb2
from svc_common.errors import InvalidArgument
from worker_svc.rows.batch import BoolArray, IntArray

MEAN, LAST = common_pb2.TASK_EMBED_MEAN, common_pb2.TASK_EMBED_LAST
_CLOSED = -1
_FIRST_SLOTS = 8


def check_added(rows: IntArray, tasks: IntArray, num_computed: IntArray) -> None:
    """Raise InvalidArgument for an unknown task, and for a mean that misses part of its prompt; arrays of equal length."""
    known = np.isin(tasks, (common_pb2.TASK_UNSPECIFIED, MEAN, LAST))
    if not known.all():
        row, task = int(rows[~known][0]), int(tasks[~known][0])
        raise InvalidArgument.field("added.options.task", f"row {row}: unknown task {task}")
    late = (tasks == MEAN) & (num_computed > 0)
    if late.any():
        raise InvalidArgument.field(
            "added.options.task",
            f"row {int(rows[late][0])} has computed tokens without hidden states: a mean must start at the first token",
        )


class PoolingSums:
    """Running sums of the pooling rows of one engine. Rows are row indexes of the batch.

    Sums are taken token by token in float64, so that an embedding's bits do not depend on how its prompt was
    chunked.
    """

    def __init__(self, hidden_size: int, device: torch.device) -> None:
        self._sums = torch.zeros(_FIRST_SLOTS, hidden_size, dtype=torch.float64, device=device)
        self._counts = np.zeros(_FIRST_SLOTS, np.int64)
        self._is_mean = np.zeros(_FIRST_SLOTS, np.bool_)
        self._free = list(range(_FIRST_SLOTS))
        self._slots = np.full(_FIRST_SLOTS, _CLOSED, np.int32)

    # --- adding and removing rows ------------------------------------------------------------------------------------

    def open(self, row: int, task: int) -> None:
        """Start pooling for `row` with `task` (MEAN or LAST), discarding previous state of this index."""
        self.forget(np.array([row], np.int32))
        if row >= len(self._slots):
            grown = np.full(max(row + 1, 2 * len(self._slots)), _CLOSED, np.int32)
            grown[: len(self._slots)] = self._slots
            self._slots = grown
        if not self._free:
            self._grow()
        slot = self._free.pop()
        self._slots[row], self._counts[slot], self._is_mean[slot] = slot, 0, task == MEAN
        self._sums[slot] = 0.0

    def _grow(self) -> None:
        size = len(self._counts)
        self._sums = torch.cat([self._sums, torch.zeros_like(self._sums)])
        self._counts = np.concatenate([self._counts, np.zeros_like(self._counts)])
        self._is_mean = np.concatenate([self._is_mean, np.zeros_like(self._is_mean)])
        self._free = list(range(size, 2 * size))

    def forget(self, rows: IntArray) -> None:
        """Drop the state of `rows`; those that do not pool are skipped."""
        rows = rows[rows < len(self._slots)]
        rows = rows[self._slots[rows] != _CLOSED]
        self._free += self._slots[rows].tolist()
        self._slots[rows] = _CLOSED

    def clear(self) -> None:
        """Drop all rows."""
        self.forget(np.arange(len(self._slots), dtype=np.int32))

    # --- a step ------------------------------------------------------------------------------------------------------

    def wants(self, rows: IntArray) -> bool:
        """True if any of `rows` pools."""
        return bool((self._slots_of(rows) != _CLOSED).any())

    def step(
        self, hidden: torch.Tensor, rows: IntArray, offsets: IntArray, done: BoolArray
    ) -> list[tuple[int, NDArray[np.float32]]]:
        """Add a step's hidden states.

        Returns (row, vector [H]) of the pooling rows that are `done`, and drops them.

        `hidden`: float32 [T, H]; tokens of `rows[i]` are `offsets[i] : offsets[i + 1]`. `done` [n]: the row's
        last token is among them.
        """
        slots = self._slots_of(rows)
        pools = np.flatnonzero(slots != _CLOSED)
        self._add(hidden, slots, pools, offsets)
        ready = pools[done[pools]]
        if not len(ready):
            return []
        of = slots[ready]
        vectors = self._sums[torch.from_numpy(of.astype(np.int64)).to(self._sums.device)].cpu().numpy()
        vectors = (vectors / self._counts[of, None]).astype(np.float32)
        self.forget(rows[ready])
        return list(zip(rows[ready].tolist(), vectors, strict=True))

    def _add(self, hidden: torch.Tensor, slots: IntArray, pools: IntArray, offsets: IntArray) -> None:
        """Add the tokens of each row: a mean adds all of them, LAST restarts with its newest."""
        of = slots[pools]
        mean = self._is_mean[of]
        begins = np.where(mean, offsets[pools], offsets[pools + 1] - 1)
        counts = offsets[pools + 1] - begins
        shift = np.repeat(begins - np.concatenate([[0], np.cumsum(counts)[:-1]]), counts)
        places = torch.from_numpy((np.arange(len(shift)) + shift).astype(np.int64)).to(hidden.device)
        targets = torch.from_numpy(np.repeat(of, counts).astype(np.int64)).to(hidden.device)
        self._counts[of] = np.where(mean, self._counts[of] + counts, 1)
        self._sums[torch.from_numpy(of[~mean].astype(np.int64)).to(hidden.device)] = 0.0
        self._sums.index_add_(0, targets, hidden[places].double())

    def _slots_of(self, rows: IntArray) -> IntArray:
        slots = np.full(len(rows), _CLOSED, np.int32)
        within = rows < len(self._slots)
        slots[within] = self._slots[rows[within]]
        return slots
