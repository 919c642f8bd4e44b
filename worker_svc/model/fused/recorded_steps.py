"""Decode steps that the device repeats by one launch each: recorded once for some numbers of rows (a CUDA graph each).

A step has the rows of the next larger recording; those too many are padding, which is computed and writes nowhere.
"""

from collections.abc import Callable, Iterator
from functools import partial

import numpy as np
import torch

from paged_kernels.decoder import FixedColumns, FixedSteps, KeptRows
from worker_svc.device.devices import Device, Work

_TOLERANCE = 3e-2
"""Of a row's logits, relative to their norm. What is computed wrongly is off by about one."""
_FEW = (1, 2, 4)
_MULTIPLE = 8
_MOST_ROWS = 512
"""Products of more rows take longer than what their launches cost."""


class RecordedSteps:
    """Recordings of `steps`. They share its memory: results are valid until the next step is computed.

    `on_made(count, total)`: called when so many recordings are made.
    """

    def __init__(self, steps: FixedSteps, device: Device, most_rows: int, on_made: Callable[[int, int], None]) -> None:
        self._steps = steps
        self._counts = np.array([*row_counts(most_rows)])
        self._replays: dict[int, Work] = {}
        # The largest first: the others fit into the memory that it needs.
        for made, count in enumerate(reversed(self._counts.tolist()), 1):
            self._replays[count] = device.recorded(partial(steps.run, count))
            on_made(made, len(self._counts))

    @property
    def count(self) -> int:
        """Number of recordings."""
        return len(self._replays)

    @property
    def most_rows(self) -> int:
        """Rows of the largest one."""
        return int(self._counts[-1])

    @property
    def kept(self) -> KeptRows:
        """What the device keeps of all sequences."""
        return self._steps.kept

    @property
    def columns(self) -> FixedColumns:
        """The rows of the next steps."""
        return self._steps.columns

    def gives(self, token_id: int, position: int, expected: torch.Tensor) -> bool:
        """True if every recording has the expected logits [1, vocab] of a token, in block g of cache group g, but for the
        rounding of products of another number of rows, and goes on with the most likely one.
        """
        device = self.columns.memory.device
        self.columns.memory.copy_(torch.from_numpy(self.columns.packed(rows=np.zeros(1, np.int32))).to(device))

        def is_right(count: int) -> bool:
            self.kept.token_ids[0], self.kept.positions[0] = token_id, position
            self.kept.block_tables[:, 0] = torch.arange(len(self.kept.block_tables), device=device)[:, None]
            self._replays[count]()
            logits, (tokens, finite) = self._steps.logits(1), self._steps.chosen(1)
            off = (logits - expected).norm(dim=-1) / expected.norm(dim=-1)
            kept = int(self.kept.token_ids[0]), int(self.kept.positions[0])
            went_on = kept == (int(tokens[0]), position + 1) and int(tokens[0]) == int(logits.argmax(-1))
            return bool(finite[0]) and went_on and float(off) <= _TOLERANCE

        return all(map(is_right, self._counts.tolist()))

    def run(self, num_rows: int) -> None:
        """Compute the first `num_rows` rows of `columns`, and perhaps some more, which must be padding."""
        self._replays[int(self._counts[np.searchsorted(self._counts, num_rows)])]()

    def logits(self, num_rows: int) -> torch.Tensor:
        """float32 [num_rows, vocab] of the last step."""
        return self._steps.logits(num_rows)

    def chosen(self, num_rows: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Its tokens int64 [num_rows], and which rows are finite, bool [num_rows]."""
        return self._steps.chosen(num_rows)


def most_rows(max_num_seqs: int) -> int:
    """Rows of the largest recording."""
    return min(max_num_seqs, _MOST_ROWS)


def row_counts(most: int) -> Iterator[int]:
    """Numbers of rows to record, ascending, so that a step has at most seven rows too many, or a quarter of them.

    The last one is `most`, or the largest that is recorded.
    """
    most = most_rows(most)
    yield from (few for few in _FEW if few < most)
    count = _MULTIPLE
    while count < most:
        yield count
        count += max(_MULTIPLE, 2 ** (count.bit_length() - 3))
    yield most
