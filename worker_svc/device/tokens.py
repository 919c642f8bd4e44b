"""The last token that each row drew, on the device: what the next step computes when the host does not know it yet (R157)."""

import torch

_FIRST_ROWS = 64


class LastTokens:
    """Owner of one int64 per row index, on `device`; read and written in the order of the device's work."""

    def __init__(self, device: torch.device) -> None:
        self._ids = torch.zeros(_FIRST_ROWS, dtype=torch.int64, device=device)

    def put(self, rows: torch.Tensor, token_ids: torch.Tensor, num_rows: int) -> None:
        """`rows` [n] drew `token_ids` [n], int64 both; row indexes are below `num_rows`."""
        if num_rows > len(self._ids):
            more = max(num_rows, 2 * len(self._ids)) - len(self._ids)
            self._ids = torch.cat([self._ids, self._ids.new_zeros(more)])
        self._ids.index_copy_(0, rows, token_ids)

    def fill(self, token_ids: torch.Tensor, places: torch.Tensor, rows: torch.Tensor) -> None:
        """Writes the tokens of `rows` [k] at `places` [k] of `token_ids` [T], int64 all."""
        token_ids.index_copy_(0, places, self._ids.index_select(0, rows))
