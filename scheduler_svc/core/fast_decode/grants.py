"""Decode grants: steps that the worker may repeat after a plan without waiting for the next one.

A plan whose batch would stay the same can grant repetitions of itself: every row computes one more token in
each. Their blocks are allocated with the plan. The worker ends a grant after a step that changes the batch;
the scheduler revokes it when something else would be planned (`Scheduler.wants_step_back`). Not here: the
step loop's side (`loop/granted_steps`) and the worker's (`worker_svc/shell/grants`).
"""

import numpy as np

from scheduler_svc.core.entries import Grant
from scheduler_svc.core.fast_decode.rows import NO_TOKEN, Ints, SteadyRows
from scheduler_svc.core.state import CoreState


def num_granted_steps(rows: SteadyRows, scheduled: Ints, state: CoreState) -> int:
    """Steps that a plan of exactly `scheduled` may grant; 0 if another plan could be wanted after it.

    The last granted step is at most the one in which the first row reaches its length limit, and no row needs
    a second new block. Half of the free blocks stay free.
    """
    if not state.limits.max_granted_steps or len(scheduled) < len(state.running):
        return 0
    if len(state.waiting) or state.swapped or state.is_warming_up:
        return 0
    ends_at = np.minimum(rows.ends_at, state.max_total_tokens)
    num_left = int((ends_at - rows.known).min()) - 1
    num_steps = max(0, min(state.limits.max_granted_steps, rows.block_size - 1, num_left))
    return num_steps if 2 * len(scheduled) <= state.cache.num_free_gpu else 0


def grant_of(rows: SteadyRows, num_steps: int) -> Grant | None:
    """The grant for a plan of all rows; None for 0 steps."""
    if not num_steps:
        return None
    stops = np.unique(rows.stop_ids)
    return Grant(num_steps, tuple(stops[stops != NO_TOKEN].tolist()))
