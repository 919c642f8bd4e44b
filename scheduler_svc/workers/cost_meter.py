"""What steps cost on the worker, measured from what they took: by this `quire` chooses between swapping and computing again."""

from collections import deque

import numpy as np
from numpy.typing import NDArray

from scheduler_svc.core.costs import Costs
from svc_common.clock import NS_PER_S

Floats = NDArray[np.float64]

_NUM_STEPS = 256
_NUM_MOVES = 64
_EVERY = 32
_NEWS = 0.2


class CostMeter:
    """Fits durations of the last steps: a least one, and what each token adds. What moved blocks add is over that, in steps that
    had some; those are rare and remembered for longer."""

    def __init__(self) -> None:
        self._steps: deque[tuple[int, float]] = deque(maxlen=_NUM_STEPS)
        self._moves: deque[tuple[int, int, float]] = deque(maxlen=_NUM_MOVES)
        self._count = 0
        self._told = Costs()

    def observe(self, num_tokens: int, num_moved_blocks: int, duration_ns: int) -> Costs | None:
        """A step is done; the costs where they are news: now and then, and at once where blocks moved for the first time."""
        if num_tokens < 1 or duration_ns <= 0:
            return None
        duration_s = duration_ns / NS_PER_S
        if num_moved_blocks:
            self._moves.append((num_tokens, num_moved_blocks, duration_s))
        else:
            self._steps.append((num_tokens, duration_s))
        self._count += 1
        is_first_move = num_moved_blocks > 0 and not self._told.swap_block_s
        return self._news() if self._count % _EVERY == 0 or is_first_move else None

    def _news(self) -> Costs | None:
        costs = self._fit()
        before = (self._told.step_s, self._told.compute_token_s, self._told.swap_block_s)
        now = (costs.step_s, costs.compute_token_s, costs.swap_block_s)
        if all(abs(new - old) <= _NEWS * old for new, old in zip(now, before, strict=True)):
            return None
        self._told = costs
        return costs

    def _fit(self) -> Costs:
        """0 for what these steps do not tell."""
        if len(self._steps) < _EVERY // 2:
            return Costs()
        tokens, durations = np.array(self._steps, np.float64).T
        spread = tokens - tokens.mean()
        variance = float(spread @ spread)
        token_s = max(0.0, float(spread @ durations) / variance) if variance else 0.0
        base_s = max(0.0, float(durations.mean() - token_s * tokens.mean()))
        return Costs(float(durations.min()), token_s, self._block_s(base_s, token_s))

    def _block_s(self, base_s: float, token_s: float) -> float:
        """At least a nanosecond once any moved: that it costs next to nothing is known too."""
        if not self._moves:
            return 0.0
        tokens, blocks, durations = np.array(self._moves, np.float64).T
        over = float(np.sum(durations - base_s - token_s * tokens))
        return max(1.0 / NS_PER_S, over / float(blocks.sum()))
