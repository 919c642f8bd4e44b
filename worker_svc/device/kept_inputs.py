"""Inputs of a step that the device keeps between steps: the rows' block tables, and the last token that each row drew."""

import numpy as np
import torch

from worker_svc.device.queue import DeviceQueue
from worker_svc.rows.table import RowTable

_FIRST_ROWS = 64


class BlockTables:
    """The block tables of `table` on `device`. A copy receives the cells that have changed, in the order of the device's work.

    `kept`: what the copy is made in; another one takes its place if it is too small.
    """

    def __init__(
        self, table: RowTable, queue: DeviceQueue, device: torch.device, kept: torch.Tensor | None = None
    ) -> None:
        self._table, self._queue = table, queue
        is_here = device.type == "cpu"
        self._copy = (
            kept
            if is_here or kept is not None
            else torch.zeros(len(table.block_tables), 0, 0, dtype=torch.int32, device=device)
        )

    def now(self) -> torch.Tensor:
        """int32 [cache groups, rows, most blocks], as the table is now. Call inside the queue's `inputs`."""
        here = self._table.block_tables
        if self._copy is None:
            return torch.from_numpy(here)
        rows, places = self._table.new_blocks()
        if len(rows):
            self._need(int(rows.max()) + 1, int(places.max()) + 1)
            of_row = rows.astype(np.int64) * self._copy.shape[2] + places
            cells, blocks = self._queue.upload(of_row, here[:, rows, places])
            self._copy.view(len(here), -1).index_copy_(1, cells, blocks)
            self._table.copied_blocks()
        return self._copy

    def _need(self, num_rows: int, width: int) -> None:
        before = self._copy
        assert before is not None
        _, rows, columns = before.shape
        if num_rows > rows or width > columns:
            wide = self._table.block_tables.shape
            self._copy = torch.zeros(wide, dtype=torch.int32, device=before.device)
            self._copy[:, :rows, :columns] = before[:, : wide[1], : wide[2]]


class LastTokens:
    """The last token drawn by each row, for a next step that starts before the host knows it.

    `ids`: int64 by row index on `device`; read and written in the order of the device's work. `kept`: as in BlockTables.
    """

    def __init__(self, device: torch.device, kept: torch.Tensor | None = None) -> None:
        self.ids = torch.zeros(_FIRST_ROWS, dtype=torch.int64, device=device) if kept is None else kept

    def put(self, rows: torch.Tensor, token_ids: torch.Tensor, num_rows: int) -> None:
        """Store `token_ids` [n] drawn by `rows` [n], both int64; row indexes are below `num_rows`."""
        if num_rows > len(self.ids):
            more = max(num_rows, 2 * len(self.ids)) - len(self.ids)
            self.ids = torch.cat([self.ids, self.ids.new_zeros(more)])
        self.ids.index_copy_(0, rows, token_ids)

    def fill(self, token_ids: torch.Tensor, places: torch.Tensor, rows: torch.Tensor) -> None:
        """Write the tokens of `rows` [k] to positions `places` [k] of `token_ids` [T]; all int64."""
        token_ids.index_copy_(0, places, self.ids.index_select(0, rows))
