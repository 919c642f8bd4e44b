"""Placements: on which worker group a waiting group starts.

A group is bound to a worker group when it starts there, not when it arrives (late binding), and stays until it is
preempted by recompute or the worker group is lost. So a placement is an admission check of each worker group: it
refuses a group that should start on another one, for a short time.
"""

import math

import numpy as np

from scheduler_svc.core.parts.admission import OpenGate
from scheduler_svc.core.parts.phases import AdmissionPart, AdmissionVerdict
from scheduler_svc.core.plan_builder import PlanBuilder
from scheduler_svc.core.reasons import Reason
from scheduler_svc.core.request import Group
from scheduler_svc.core.state import CoreState

_MOST_PASSED = 32
"""Groups left to other worker groups in one plan, so that a plan does not examine a whole long queue."""
_UNKNOWN_STEP_S, _UNKNOWN_TOKEN_S = 0.02, 1e-4
_OUTPUT_SHARE = 0.1
"""A prompt delays the first token of one behind it by all its tokens; rows that decode run beside it in the same steps."""
_PREFIX_WEIGHT = 2.0
"""A prefix that is computed again takes its time, and blocks in which prefixes of others are cached."""


class AnyPlace(OpenGate):
    """Base of placements. Alone it starts a group on the first worker group that takes work and has room for its length."""

    def check(self, group: Group, state: CoreState, builder: PlanBuilder) -> AdmissionVerdict:
        """ENTER if the group should start here."""
        if not state.takes_work:
            state.journal.stop(group, Reason.WORKER_DRAINS, worker=state.number)
            return AdmissionVerdict.STOP
        workers = state.shared.workers
        if len(workers) == 1 or group is builder.favoured or group is state.guard.favourite:
            return AdmissionVerdict.ENTER
        if not can_hold(state, group):
            state.journal.skip(group, Reason.GROUP_TOO_SMALL, worker=state.number, tokens=state.cache.capacity_tokens)
            return _leave_to(None, group, 0, builder)
        return self._choose(group, state, [s for s in workers if s.takes_work and can_hold(s, group)], builder)

    def _choose(
        self, group: Group, state: CoreState, workers: list[CoreState], builder: PlanBuilder
    ) -> AdmissionVerdict:
        return AdmissionVerdict.ENTER


class RoundRobin(AnyPlace):
    """Starts groups on the worker groups in turn. One that has no room when its turn comes is waited for during a step."""

    def _choose(
        self, group: Group, state: CoreState, workers: list[CoreState], builder: PlanBuilder
    ) -> AdmissionVerdict:
        if group.turn is None:
            group.turn, state.shared.num_turns = state.shared.num_turns, state.shared.num_turns + 1
        turn = workers[group.turn % len(workers)]
        if turn is state or not has_seats(turn, group, builder) or _has_waited(group, step_s(turn), builder):
            return AdmissionVerdict.ENTER
        state.journal.skip(group, Reason.GROUP_BUSY, worker=turn.number)
        return _leave_to(turn, group, 0, builder)


class EarliestEnd(AnyPlace):
    """Starts a group where its prompt and the work queued before it would be computed first, in estimated seconds.

    Queued work of a worker group: the tokens that its running groups have to compute, with a share of their expected
    outputs, at its measured cost of a token. `sees_prefixes`: a cached prefix of the prompt is not computed. A group is
    left waiting for a worker group with a longer cached prefix for twice the time in which that part of the prompt
    would be computed here, and half of the time since its arrival; for one with less work, for one of its steps.

    Compares exact tables, where routers guess (Preble, arXiv 2407.00023). The numbers: docs/decisions/0028-worker-groups.md.
    """

    def __init__(self, *, sees_prefixes: bool) -> None:
        self._sees_prefixes = sees_prefixes

    def _choose(
        self, group: Group, state: CoreState, workers: list[CoreState], builder: PlanBuilder
    ) -> AdmissionVerdict:
        cached = {s.number: self._num_cached(group, s) for s in workers}
        ends = {s.number: self._seconds(group, s, cached[s.number], builder, here=s is state) for s in workers}
        able = [
            s
            for s in workers
            if s is state or cached[s.number] > cached[state.number] or may_start(s, group, cached[s.number], builder)
        ]
        best = min(able, key=lambda s: (ends[s.number], s is not state, s.number))
        saved_s = (cached[best.number] - cached[state.number]) * token_s(state)
        most_s = step_s(best) + (2 * saved_s + (builder.now - group.request.arrival_time) / 2 if saved_s > 0 else 0.0)
        if best is state or _has_waited(group, most_s, builder):
            new = max(0, group.live[0].num_tokens - cached[state.number])
            state.queued_tokens = queued_tokens(state) + new  # it may yet be refused; the next plan counts again
            return AdmissionVerdict.ENTER
        if saved_s <= 0:
            here_s, there_s = round(ends[state.number], 6), round(ends[best.number], 6)
            state.journal.skip(group, Reason.GROUP_BUSY, worker=best.number, here_s=here_s, there_s=there_s)
        else:
            known, here = cached[best.number], cached[state.number]
            state.journal.skip(
                group, Reason.PREFIX_AFFINITY, worker=best.number, known=known, here=here, saves_s=round(saved_s, 6)
            )
        return _leave_to(best, group, cached[best.number], builder)

    def _num_cached(self, group: Group, state: CoreState) -> int:
        return state.cache.num_cached_tokens(group.live[0]) if self._sees_prefixes else 0

    @staticmethod
    def _seconds(group: Group, state: CoreState, num_cached: int, builder: PlanBuilder, *, here: bool) -> float:
        """Until the prompt is computed there, behind what was left to that worker group. Another one that runs first ends
        its step.
        """
        _, left = builder.left.get(state.number, (0, 0.0))
        tokens = queued_tokens(state) + left + _PREFIX_WEIGHT * (group.live[0].num_tokens - num_cached)
        return tokens * token_s(state) + (0.0 if here or state.is_idle else step_s(state))


def queued_tokens(state: CoreState) -> float:
    """Tokens that the groups bound to a worker group have yet to compute, with a share of their expected outputs."""
    if state.queued_tokens is None:
        state.queued_tokens = _OUTPUT_SHARE * (_outputs_of_rows(state) + _outputs_of_groups(state)) + _prompts(state)
    return state.queued_tokens


def _outputs_of_rows(state: CoreState) -> float:
    rows = state.fast_rows
    if not rows.members:
        return 0.0
    known = rows.known.astype(np.float64)
    left = np.maximum(1.0, np.minimum(rows.ends_at, state.max_total_tokens) - known)
    return float(state.lengths.remaining(known - rows.prompts, left).sum())


def _loose(state: CoreState) -> list[Group]:
    """The groups that are not fast-decode rows."""
    return [group for group in (*state.running, *state.swapped) if not group.is_fast and group.live]


def _prompts(state: CoreState) -> int:
    firsts = [group.live[0] for group in _loose(state)]
    return sum(max(0, s.num_tokens - s.num_computed_tokens) for s in firsts)


def _outputs_of_groups(state: CoreState) -> float:
    groups = _loose(state)
    if not groups:
        return 0.0
    firsts = [group.live[0] for group in groups]
    outputs = np.array([s.num_output_tokens for s in firsts], np.float64)
    most = np.array([s.num_prompt_tokens + s.request.stop.max_tokens - s.num_tokens for s in firsts], np.float64)
    width = np.array([group.max_num_running_seqs for group in groups], np.float64)
    return float((width * state.lengths.remaining(outputs, np.maximum(1.0, most))).sum())


def token_s(state: CoreState) -> float:
    """Seconds that a token adds to a step there."""
    costs = state.costs.now
    return costs.compute_token_s or costs.step_s or _UNKNOWN_TOKEN_S


def step_s(state: CoreState) -> float:
    """Seconds of a step there."""
    return state.costs.now.step_s or _UNKNOWN_STEP_S


def has_seats(state: CoreState, group: Group, builder: PlanBuilder) -> bool:
    """True if `max_num_seqs` has room for the group there, beside what was left to that worker group."""
    num_left, _ = builder.left.get(state.number, (0, 0.0))
    return state.num_running_seqs + num_left + group.max_num_running_seqs <= state.limits.max_num_seqs


def can_hold(state: CoreState, group: Group) -> bool:
    """True if the cache there could hold the group at its longest, or no other could hold more of it."""
    request, size = group.request, state.limits.block_size
    longest = min(len(request.prompt_token_ids) + request.stop.max_tokens, state.max_total_tokens)
    need = math.ceil(longest / size) * size * group.max_num_running_seqs
    return state.cache.capacity_tokens >= min(need, state.shared.most_tokens)


def may_start(state: CoreState, group: Group, num_cached: int, builder: PlanBuilder) -> bool:
    """True if the group has seats there, and free blocks for the rest of its prompt."""
    _, left = builder.left.get(state.number, (0, 0.0))
    need = math.ceil((group.live[0].num_tokens - num_cached + left) / state.limits.block_size)
    return has_seats(state, group, builder) and need <= state.cache.num_free_gpu


def fits_elsewhere(group: Group, state: CoreState, builder: PlanBuilder) -> bool:
    """True if another worker group has room for a waiting group now, so that none needs to be preempted for it here."""
    others = [s for s in state.shared.workers if s is not state and s.takes_work]
    return any(may_start(s, group, s.cache.num_cached_tokens(group.live[0]), builder) for s in others)


def _leave_to(state: CoreState | None, group: Group, num_cached: int, builder: PlanBuilder) -> AdmissionVerdict:
    """SKIP, with the group counted as queued on that worker group; STOP once so many were left that the rest is not examined."""
    if state is not None:
        num_seqs, num_tokens = builder.left.get(state.number, (0, 0.0))
        new = group.live[0].num_tokens - num_cached
        builder.left[state.number] = num_seqs + group.max_num_running_seqs, num_tokens + new
    builder.num_passed += 1
    return AdmissionVerdict.SKIP if builder.num_passed < _MOST_PASSED else AdmissionVerdict.STOP


def _has_waited(group: Group, seconds: float, builder: PlanBuilder) -> bool:
    """True if the group was left to other worker groups for so long already. Its waiting begins with the first call."""
    if group.passed_at is None:
        group.passed_at = builder.now
    return builder.now - group.passed_at > seconds


PLACEMENTS: dict[str, AdmissionPart] = {
    "prefix_affinity": EarliestEnd(sees_prefixes=True),
    "least_work": EarliestEnd(sees_prefixes=False),
    "round_robin": RoundRobin(),
}
"""By the word of the policy's key `placement`. They keep no state of their own."""
