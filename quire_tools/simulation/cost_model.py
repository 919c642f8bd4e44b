"""Durations in virtual time: a linear model of a step, typical machines, and fitting the model to measured steps."""

from collections.abc import Iterable
from dataclasses import astuple, dataclass

import numpy as np
from numpy.typing import NDArray

from scheduler_svc.core.parts.costs import Costs
from scheduler_svc.core.plan import ScheduledSequence, StepPlan
from svc_common.errors import InvalidArgument

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class StepShape:
    """The properties of a step that its duration depends on.

    `num_prefill_tokens`: tokens of shares with more than one token; `num_decode_seqs`: number of the other
    shares. `num_context_tokens`: context length summed over all shares, including their own tokens.
    `num_pairs`: (query, key) pairs that prefills attend to. `num_moved_blocks`: blocks swapped or copied.
    """

    num_prefill_tokens: int = 0
    num_decode_seqs: int = 0
    num_context_tokens: int = 0
    num_pairs: int = 0
    num_moved_blocks: int = 0

    @classmethod
    def of(cls, plan: StepPlan, block_size: int) -> "StepShape":
        """The shape of a plan. Cached blocks of `block_size` tokens count as context, although v0 schedules them."""
        prefill, decodes, context, pairs = 0, 0, 0, 0
        if plan.fast is not None:
            decodes = len(plan.fast.rows)
            context = int(plan.fast.computed_before.sum()) + decodes
        for entry in plan.entries:
            end = entry.computed_before + entry.num_tokens
            context += end
            if entry.num_tokens == 1:
                decodes += 1
            else:
                num_tokens = end - first_computed(entry, block_size)
                prefill += num_tokens
                pairs += num_tokens * (end - num_tokens) + num_tokens * (num_tokens + 1) // 2
        moved = len(plan.swap_in) + len(plan.swap_out) + len(plan.copy)
        return cls(prefill, decodes, context, pairs, moved)


def first_computed(entry: ScheduledSequence, block_size: int) -> int:
    """The first position that a share computes; at least its last position is computed."""
    last = entry.computed_before + entry.num_tokens - 1
    return min(last, max(entry.computed_before, entry.num_cached_blocks * block_size))


@dataclass(frozen=True, slots=True)
class CostModel:
    """Durations in seconds. A step takes `base_s`, plus costs for its `StepShape`: prompt tokens, decoding
    sequences, context tokens read, query-key pairs of prefills, and moved blocks.

    `schedule_s`: planning a step and sending it, of which the scheduler itself is busy for `plan_s` and plans for no other
    worker (0 = all of it); `wire_s`: from the worker's result to the scheduler. Without
    asynchronous scheduling both add to each step; with it they overlap the running step. `noise`: standard
    deviation of the logarithm of a step's duration, 0 = none.
    """

    base_s: float = 0.0
    prefill_token_s: float = 0.0
    decode_seq_s: float = 0.0
    context_token_s: float = 0.0
    pair_s: float = 0.0
    moved_block_s: float = 0.0
    schedule_s: float = 0.0
    plan_s: float = 0.0
    wire_s: float = 0.0
    noise: float = 0.0

    @property
    def costs(self) -> Costs:
        """The costs that a core would have measured (`Scheduler.observe_costs`)."""
        return Costs(self.base_s, self.prefill_token_s, self.moved_block_s)

    def step_s(self, shape: StepShape) -> float:
        """Duration of a step of that shape at the worker, without noise."""
        return (
            self.base_s
            + self.prefill_token_s * shape.num_prefill_tokens
            + self.decode_seq_s * shape.num_decode_seqs
            + self.context_token_s * shape.num_context_tokens
            + self.pair_s * shape.num_pairs
            + self.moved_block_s * shape.num_moved_blocks
        )

    @classmethod
    def fit(cls, samples: Iterable[tuple[StepShape, float]], *, schedule_s: float = 0.0, wire_s: float = 0.0) -> "Fit":
        """The model with the least squared relative error over measured steps (shape, seconds); no coefficient is negative.

        Raises InvalidArgument if no step has a positive duration. Times between steps are not in samples, so
        they are given.
        """
        kept = [(shape, duration_s) for shape, duration_s in samples if duration_s > 0]
        if not kept:
            raise InvalidArgument.field("samples", "no step of positive duration to fit a cost model to")
        measured = np.array([duration_s for _, duration_s in kept])
        shapes = np.array([(1, *astuple(shape)) for shape, _ in kept], np.float64)
        coefficients = non_negative_least_squares(shapes / measured[:, None], np.ones(len(kept)))
        base, prefill, decode, context, pair, moved = coefficients.tolist()
        model = cls(base, prefill, decode, context, pair, moved, schedule_s=schedule_s, wire_s=wire_s)
        return Fit(model, float(np.median(np.abs(shapes @ coefficients - measured) / measured)), len(kept))


@dataclass(frozen=True, slots=True)
class Fit:
    """A fitted model. `error`: median over the steps of |modelled - measured| / measured."""

    model: CostModel
    error: float
    num_steps: int


GPU = CostModel(
    base_s=6.4e-3,
    prefill_token_s=32e-6,
    decode_seq_s=15e-6,
    context_token_s=44e-9,
    pair_s=1.8e-9,
    moved_block_s=100e-6,
    schedule_s=1e-3,
    plan_s=0.25e-3,
    wire_s=0.5e-3,
)
"""About an 8-billion-parameter model in bf16 on one H100: published times per token, the rest derived from its arithmetic."""

CPU = CostModel(
    base_s=8e-3,
    prefill_token_s=0.65e-3,
    decode_seq_s=0.85e-3,
    context_token_s=0.7e-6,
    pair_s=30e-9,
    moved_block_s=40e-6,
    schedule_s=1e-3,
    wire_s=0.5e-3,
)
"""About a 135-million-parameter model in bf16 on two CPU cores."""


def non_negative_least_squares(matrix: Floats, target: Floats) -> Floats:
    """The x >= 0 that minimizes |matrix @ x - target|: an active set grows by the steepest column until none improves it.

    Lawson and Hanson, "Solving Least Squares Problems", chapter 23.
    """
    scale = np.linalg.norm(matrix, axis=0)
    scale[scale == 0] = 1.0
    scaled = matrix / scale
    x, active = np.zeros(scaled.shape[1]), np.zeros(scaled.shape[1], np.bool_)
    for _ in range(3 * len(x)):
        slope = np.where(active, -np.inf, scaled.T @ (target - scaled @ x))
        if slope.max() <= 1e-9 * len(target):
            break
        active[int(slope.argmax())] = True
        x = _within(scaled, target, x, active)
    found: Floats = x / scale
    return found


def _within(matrix: Floats, target: Floats, x: Floats, active: NDArray[np.bool_]) -> Floats:
    """The least squares solution over the active columns; columns that would become negative are removed from the set."""
    while True:
        best = np.zeros(len(x))
        best[active] = np.linalg.lstsq(matrix[:, active], target, rcond=None)[0]
        bad = active & (best <= 0)
        if not bad.any():
            return best
        step = float((x[bad] / np.maximum(x[bad] - best[bad], 1e-300)).min())
        x = x + step * (best - x)
        active &= x > 1e-12
        x = np.where(active, x, 0.0)
