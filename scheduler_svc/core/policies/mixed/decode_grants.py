"""Decode grants: steps that the worker may repeat after a plan without waiting for the next one.

A plan whose batch would stay the same can grant repetitions of itself: every row computes one more token in
each. The worker ends a grant after a step that changes the batch; the scheduler revokes it when something else
would be planned (`Scheduler.wants_step_back`). Not here: the step loop's side (`loop/step_loop`) and the worker's
(`worker_svc/shell/grants`).
"""

import numpy as np

from scheduler_svc.core.entries import StepGrant
from scheduler_svc.core.fast_decode.rows import NO_TOKEN, FastRows, Ints
from scheduler_svc.core.state import CoreState


def grant_of(rows: FastRows, scheduled: Ints, num_steps_alike: int, state: CoreState, now: float) -> StepGrant | None:
    """The grant of a plan of exactly `scheduled`, whose blocks are allocated; None if it may not be repeated.

    `num_steps_alike`: see `FastBlocks`.
    A request that arrives during a granted step waits for its revocation, and for the next granted step if the
    revocation comes too late. So nothing is granted while requests keep arriving (`CoreState.pause_grants`).
    No granted step needs a block or keeps a checkpoint, so that block tables are the same as without grants; the last one
    is at most that in which the first row reaches its length limit.
    """
    if not state.limits.max_granted_steps or len(scheduled) < len(state.running):
        return None
    if len(state.waiting) or state.swapped or state.is_warming_up or now < state.shared.grants_from:
        return None
    num_left = int((np.minimum(rows.ends_at, state.max_total_tokens) - rows.known).min()) - 1
    num_steps = min(state.limits.max_granted_steps, num_steps_alike, num_left)
    if num_steps < 1:
        return None
    stops = set(rows.stop_ids.ravel().tolist()) - {NO_TOKEN}
    return StepGrant(num_steps, tuple(sorted(stops)))
