"""Decode steps that the device repeats by one launch each: recorded once for some numbers of rows (a CUDA graph each).

A step has the rows of the next larger recording; those too many are padding, which is computed and writes nowhere.
"""

from collections.abc import Iterator
from functools import partial

import numpy as np
import torch

from paged_kernels.decoder import FixedSteps
from worker_svc.device.devices import Device, Work
from worker_svc.model.input_batch import ModelInput

_TOLERANCE = 3e-2
"""Of a row's logits, relative to their norm. What is computed wrongly is off by about one."""
_FEW = (1, 2, 4)
_MULTIPLE = 8
_MOST_ROWS = 512
"""Products of more rows take longer than what their launches cost."""


class RecordedSteps:
    """Recordings of `steps`. They share its memory: logits are valid until the next step is computed."""

    def __init__(self, steps: FixedSteps, device: Device, most_rows: int) -> None:
        self._steps = steps
        self._counts = np.array([*row_counts(most_rows)])
        # The largest first: the others fit into the memory that it needs.
        self._replays: dict[int, Work] = {
            count: device.recorded(partial(steps.run, count)) for count in reversed(self._counts.tolist())
        }

    @property
    def count(self) -> int:
        """Number of recordings."""
        return len(self._replays)

    def gives(self, step: ModelInput, expected: torch.Tensor) -> bool:
        """True if every recording has the expected logits of a step, but for the rounding of products of another number of rows."""

        def off(count: int) -> float:
            return float(((self._computed(step, count) - expected).norm(dim=-1) / expected.norm(dim=-1)).max())

        return self.takes(step) and all(off(count) <= _TOLERANCE for count in self._counts if count >= step.num_logits)

    def takes(self, step: ModelInput) -> bool:
        """True for steps in which each sequence computes its next token, in an order that can be repeated."""
        offsets, num_rows = step.attention.offsets, step.num_logits
        return (
            step.adapter_ids is None
            and num_rows == step.token_ids.shape[1] == len(offsets) - 1
            and 0 < num_rows <= self._counts[-1]
            and bool((np.diff(offsets) == 1).all())
        )

    def logits(self, step: ModelInput) -> torch.Tensor:
        """float32 [rows, vocab]."""
        return self._computed(step, int(self._counts[np.searchsorted(self._counts, step.num_logits)]))

    def _computed(self, step: ModelInput, count: int) -> torch.Tensor:
        self._steps.take(step.token_ids[0], step.attention, count)
        self._replays[count]()
        return self._steps.logits(step.num_logits)


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
