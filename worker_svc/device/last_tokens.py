"""The last token drawn by each row, kept on the device as input of a next step that starts before the host knows it."""

import torch

_FIRST_ROWS = 64


class LastTokens:
    """One int64 per row index on `device`; read and written in the order of the device's work."""

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
