"""Inputs of a step that the device keeps between steps: the rows' block tables, and the last token that each row drew."""

import numpy as np
import torch

from worker_svc.device.queue import DeviceQueue
from worker_svc.rows.table import RowTable

_FIRST_ROWS = 64


class BlockTables:
    """The block tables of `table` on `device`. A copy receives the cells that have changed, in the order of the device's work."""

    def __init__(self, table: RowTable, queue: DeviceQueue, device: torch.device) -> None:
        self._table, self._queue = table, queue
        self._copy = None if device.type == "cpu" else torch.zeros(0, 0, dtype=torch.int32, device=device)

    def now(self) -> torch.Tensor:
        """int32 [rows, most blocks], as the table is now. Call inside the queue's `inputs`."""
        here = self._table.block_tables
        if self._copy is None:
            return torch.from_numpy(here)
        if self._copy.shape != here.shape:
            # Smaller after a reset of the table, which tells of all its blocks again.
            sizes, before = here.shape, self._copy
            self._copy = torch.zeros(sizes, dtype=torch.int32, device=before.device)
            self._copy[: before.shape[0], : before.shape[1]] = before[: sizes[0], : sizes[1]]
        rows, places = self._table.new_blocks()
        if len(rows):
            cells, blocks = self._queue.upload(rows.astype(np.int64) * here.shape[1] + places, here[rows, places])
            self._copy.view(-1).index_copy_(0, cells, blocks)
            self._table.copied_blocks()
        return self._copy


class LastTokens:
    """The last token drawn by each row, for a next step that starts before the host knows it.

    One int64 per row index on `device`; read and written in the order of the device's work.
    """

    def __init__(self, device: torch.device) -> None:
        self._ids = torch.zeros(_FIRST_ROWS, dtype=torch.int64, device=device)

    def put(self, rows: torch.Tensor, token_ids: torch.Tensor, num_rows: int) -> None:
        """Store `token_ids` [n] drawn by `rows` [n], both int64; row indexes are below `num_rows`."""
        if num_rows > len(self._ids):
            more = max(num_rows, 2 * len(self._ids)) - len(self._ids)
            self._ids = torch.cat([self._ids, self._ids.new_zeros(more)])
        self._ids.index_copy_(0, rows, token_ids)

    def fill(self, token_ids: torch.Tensor, places: torch.Tensor, rows: torch.Tensor) -> None:
        """Write the tokens of `rows` [k] to positions `places` [k] of `token_ids` [T]; all int64."""
        token_ids.index_copy_(0, places, self._ids.index_select(0, rows))
