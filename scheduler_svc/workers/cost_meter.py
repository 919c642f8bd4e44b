"""Measured costs of a worker's steps, by which the policy `quire` chooses between swapping and recomputing."""

from collections import defaultdict, deque

import numpy as np
from numpy.typing import NDArray

from scheduler_svc.core.parts.costs import Costs
from svc_common.clock import NS_PER_S

Floats = NDArray[np.float64]

_NUM_STEPS = 32
_NUM_MOVES = 64
_EVERY = 32
_NEWS = 0.2


class CostMeter:
    """Least-squares fit of the durations of steps: a base and a cost per token.

    The last steps of each size are kept, by powers of two, so that many decode steps do not push out those with
    prompts, which tell the cost of a token. Cost per moved block is what steps with moves take beyond that; such
    steps are rare and kept separately.
    """

    def __init__(self) -> None:
        self._steps: defaultdict[int, deque[tuple[int, float]]] = defaultdict(lambda: deque(maxlen=_NUM_STEPS))
        self._moves: deque[tuple[int, int, float]] = deque(maxlen=_NUM_MOVES)
        self._count = 0
        self._told = Costs()

    def observe(self, num_tokens: int, num_moved_blocks: int, duration_ns: int) -> Costs | None:
        """Add a step. Returns new estimates if they changed noticeably, checked every 32 steps and at the first block moves."""
        if num_tokens < 1 or duration_ns <= 0:
            return None
        duration_s = duration_ns / NS_PER_S
        if num_moved_blocks:
            self._moves.append((num_tokens, num_moved_blocks, duration_s))
        else:
            self._steps[num_tokens.bit_length()].append((num_tokens, duration_s))
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
        """Estimates from the kept steps; 0 for what they do not determine."""
        steps = [step for steps in self._steps.values() for step in steps]
        if len(steps) < _EVERY // 2:
            return Costs()
        tokens, durations = np.array(steps, np.float64).T
        spread = tokens - tokens.mean()
        variance = float(spread @ spread)
        token_s = max(0.0, float(spread @ durations) / variance) if variance else 0.0
        base_s = max(0.0, float(durations.mean() - token_s * tokens.mean()))
        return Costs(float(durations.min()), token_s, self._block_s(base_s, token_s))

    def _block_s(self, base_s: float, token_s: float) -> float:
        """Cost per moved block; 0 if none moved, else at least 1 ns, so that a negligible cost differs from an unknown one."""
        if not self._moves:
            return 0.0
        tokens, blocks, durations = np.array(self._moves, np.float64).T
        over = float(np.sum(durations - base_s - token_s * tokens))
        return max(1.0 / NS_PER_S, over / float(blocks.sum()))
