"""States after each token at which rows with draft tokens may end, until it is known which of these were right."""

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray

from worker_svc.model.states.layout import StatePlace

IntArray = NDArray[np.int32]
Write = Callable[[StatePlace, torch.Tensor, torch.Tensor], None]
"""As `SequenceStates.write`."""


@dataclass(slots=True)
class PossibleEnds:
    """Owner of these states. Each is of one row after so many tokens; all modules add theirs in the same order."""

    _of: list[tuple[int, int]] = field(default_factory=list)
    _states: dict[StatePlace, list[torch.Tensor]] = field(default_factory=dict)

    def expect(self, rows: IntArray, num_tokens: NDArray[np.int64]) -> None:
        """Modules will `add` the states of `rows` [n] after `num_tokens` [n]."""
        self._of += zip(rows.tolist(), num_tokens.tolist(), strict=True)

    def add(self, place: StatePlace, states: torch.Tensor) -> None:
        """The states of one module: uint8 [n, bytes]."""
        self._states.setdefault(place, []).append(states)

    def settle(self, rows: IntArray, num_tokens: IntArray, own: IntArray, write: Write) -> None:
        """Write the states of `rows` [n] after `num_tokens` [n] to their blocks `own` [n, blocks], and drop all.

        Rows without such an end are left as they are: their blocks have the states after the last token of the step.
        """
        index = {end: i for i, end in enumerate(self._of)}
        found = [index.get(end, -1) for end in zip(rows.tolist(), num_tokens.tolist(), strict=True)]
        chosen = np.flatnonzero(np.array(found, np.int64) >= 0)
        states, (self._of, self._states) = self._states, ([], {})
        if not len(chosen):
            return
        at, ids = np.array(found, np.int64)[chosen], own[chosen].astype(np.int64)
        for place, parts in states.items():
            device = parts[0].device
            kept = torch.cat(parts).index_select(0, torch.from_numpy(at).to(device))
            write(place, torch.from_numpy(ids).to(device), kept)
