"""Placements: on which worker group a waiting group starts.

A group is bound to a worker group when it starts there, not when it arrives (late binding), and stays until it is
preempted by recompute or the worker group is lost. So a placement is an admission check of each worker group: it
refuses a group that should start on another one, for a short time.
"""

import heapq
import math
from collections.abc import Iterable

from scheduler_svc.core.parts.admission import OpenGate
from scheduler_svc.core.parts.phases import AdmissionPart, AdmissionVerdict
from scheduler_svc.core.plan_builder import PlanBuilder
from scheduler_svc.core.reasons import Reason
from scheduler_svc.core.request import Group
from scheduler_svc.core.state import CoreState

_MOST_PASSED = 32
"""Groups left to other worker groups in one plan, so that a plan does not examine a whole long queue."""
_UNKNOWN_STEP_S, _UNKNOWN_TOKEN_S, _UNKNOWN_OUTPUT = 0.02, 1e-4, 64.0
_OUTPUT_SHARE = 0.1
"""A prompt delays the first token of one behind it by all its tokens; rows that decode run beside it in the same steps."""
_PREFIX_WEIGHT = 6.0
"""A prefix that is computed again takes its time, and blocks in which prefixes of others are cached."""


class AnyPlace(OpenGate):
    """Base of placements. Alone it starts a group on the first worker group that takes work and has room for its length."""

    def check(self, group: Group, state: CoreState, builder: PlanBuilder) -> AdmissionVerdict:
        """ENTER if the group should start here."""
        if not state.takes_work:
            state.journal.stop(group, Reason.WORKER_DRAINS, worker=state.number)
            return AdmissionVerdict.STOP
        if len(state.shared.workers) == 1 or group is builder.favoured or group is state.guard.favourite:
            return AdmissionVerdict.ENTER
        if not can_hold(state, group):
            state.journal.skip(group, Reason.GROUP_TOO_SMALL, worker=state.number, tokens=state.cache.capacity_tokens)
            return _skip(builder)
        if (other := _still_left_to(group, state, builder)) is not None:
            return _leave_to(other, group, builder)
        return self._choose(group, state, builder)

    def _choose(self, group: Group, state: CoreState, builder: PlanBuilder) -> AdmissionVerdict:
        return AdmissionVerdict.ENTER


class RoundRobin(AnyPlace):
    """Starts groups on the worker groups in turn. One that has no room when its turn comes is waited for during a step."""

    def _choose(self, group: Group, state: CoreState, builder: PlanBuilder) -> AdmissionVerdict:
        workers = [s for s in state.shared.workers if s.takes_work and can_hold(s, group)]
        if group.turn is None:
            group.turn, state.shared.num_turns = state.shared.num_turns, state.shared.num_turns + 1
        turn = workers[group.turn % len(workers)]
        if turn is state or not has_seats(turn, group, builder) or not _may_leave(group, step_s(turn), builder):
            return AdmissionVerdict.ENTER
        state.journal.skip(group, Reason.GROUP_BUSY, worker=turn.number)
        return _leave_to(turn, group, builder)


class EarliestEnd(AnyPlace):
    """Starts a group where its prompt and the work queued before it would be computed first, in estimated seconds.

    Queued work of a worker group: the tokens that its running groups have to compute, with a share of their expected
    outputs, at its measured cost of a token. `sees_prefixes`: a cached prefix of the prompt is not computed. A group is
    left waiting for a worker group with a longer cached prefix for twice the time in which that part of the prompt
    would be computed here, and half of the time since its arrival; for one with less work, for one of its steps.

    Only worker groups that have the first block of the prompt, the one with the least queued work and the present one
    are compared, so that the cost of a decision hardly grows with their number. A decision holds until the worker group
    to which the group was left has planned.

    Compares exact tables, where routers guess (Preble, arXiv 2407.00023). The numbers: docs/decisions/0028-worker-groups.md.
    """

    def __init__(self, *, sees_prefixes: bool) -> None:
        self._sees_prefixes = sees_prefixes

    def _choose(self, group: Group, state: CoreState, builder: PlanBuilder) -> AdmissionVerdict:
        able = {state.number: state}
        able.update((s.number, s) for s in self._warm(group, state))
        if (idlest := _idlest(group, state, builder)) is not None:
            able[idlest.number] = idlest
        cached = {number: self._num_cached(group, s) for number, s in able.items()}
        ends = {number: _end_s(group, s, cached[number], builder, here=s is state) for number, s in able.items()}
        best = able[min(able, key=lambda number: (ends[number], number != state.number, number))]
        saved_s = (cached[best.number] - cached[state.number]) * token_s(state)
        most_s = step_s(best) + (2 * saved_s + (builder.now - group.request.arrival_time) / 2 if saved_s > 0 else 0.0)
        if best is state or not _may_leave(group, most_s, builder):
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
        return _leave_to(best, group, builder)

    def _warm(self, group: Group, state: CoreState) -> Iterable[CoreState]:
        """Other worker groups that have the beginning of the prompt cached, or run an older sample of the request."""
        if not self._sees_prefixes:
            return
        key = state.cache.first_key(group.live[0])
        sample_of = group.request.groups[0].worker if len(group.request.groups) > 1 else None
        for s in state.shared.workers:
            has_it = s.number == sample_of or (key is not None and s.cache.ledger.gpu.lookup(key) is not None)
            if has_it and s is not state and s.takes_work and can_hold(s, group):
                yield s

    def _num_cached(self, group: Group, state: CoreState) -> int:
        return state.cache.num_cached_tokens(group.live[0]) if self._sees_prefixes else 0


# --- estimates -------------------------------------------------------------------------------------------------------


def _end_s(group: Group, state: CoreState, num_cached: int, builder: PlanBuilder, *, here: bool) -> float:
    """Seconds until the prompt is computed there, behind what was left to that worker group."""
    prompt = _PREFIX_WEIGHT * (group.live[0].num_tokens - num_cached)
    return _queue_s(state, builder, here=here) + prompt * token_s(state)


def _queue_s(state: CoreState, builder: PlanBuilder, *, here: bool) -> float:
    """Seconds of the work queued on a worker group. Another one that runs first ends its step."""
    _, left = builder.left.get(state.number, (0, 0.0))
    return (queued_tokens(state) + left) * token_s(state) + (0.0 if here or state.is_idle else step_s(state))


def _idlest(group: Group, state: CoreState, builder: PlanBuilder) -> CoreState | None:
    """The other worker group with the least queued work of those where the group could start now; None if there is none."""
    if builder.idlest is None:
        others = (s for s in state.shared.workers if s.takes_work and s is not state)
        builder.idlest = [(_queue_s(s, builder, here=False), s.number) for s in others]
        heapq.heapify(builder.idlest)
    full, found = [], None
    while builder.idlest and found is None:
        queue_s, number = builder.idlest[0]
        other = state.shared.workers[number]
        if queue_s != (now_s := _queue_s(other, builder, here=False)):
            heapq.heapreplace(builder.idlest, (now_s, number))  # groups were left to it since
        elif can_hold(other, group) and may_start(other, group, 0, builder):
            found = other
        else:
            full.append(heapq.heappop(builder.idlest))
    for entry in full:
        heapq.heappush(builder.idlest, entry)
    return found


def queued_tokens(state: CoreState) -> float:
    """Tokens that the groups bound to a worker group have yet to compute, with a share of their expected outputs."""
    if state.queued_tokens is None:
        num_seqs, half = state.num_running_seqs + len(state.swapped), state.lengths.mean / 2 or _UNKNOWN_OUTPUT
        state.queued_tokens = prompt_tokens_left(state) + _OUTPUT_SHARE * half * num_seqs
    return state.queued_tokens


def prompt_tokens_left(state: CoreState) -> int:
    """Tokens of prompts, and of outputs to be computed again, that are not computed; fast-decode rows have none."""
    missing = len(state.running) - len(state.fast_rows.members)
    pending = 0
    for group in reversed(state.running):
        if missing <= 0:
            break
        if not group.is_fast:
            missing -= 1
            first = group.sequences[0]
            pending += max(0, first.num_tokens - first.num_computed_tokens)
    return pending


def token_s(state: CoreState) -> float:
    """Seconds that a token adds to a step there."""
    costs = state.costs.now
    return costs.compute_token_s or costs.step_s or _UNKNOWN_TOKEN_S


def step_s(state: CoreState) -> float:
    """Seconds of a step there."""
    return state.costs.now.step_s or _UNKNOWN_STEP_S


# --- room ------------------------------------------------------------------------------------------------------------


def has_seats(state: CoreState, group: Group, builder: PlanBuilder) -> bool:
    """True if `max_num_seqs` has room for the group there, beside what was left to that worker group."""
    num_left, _ = builder.left.get(state.number, (0, 0.0))
    return state.num_running_seqs + num_left + group.max_num_running_seqs <= state.limits.max_num_seqs


def can_hold(state: CoreState, group: Group) -> bool:
    """True if the cache there could hold the group at its longest, or no other could hold more of it."""
    if state.is_largest:
        return True
    cache = state.cache
    longest = min(len(group.request.prompt_token_ids) + group.request.stop.max_tokens, state.max_total_tokens)
    most = cache.ledger.most_blocks(longest, group.max_num_running_seqs)
    return cache.capacity_blocks > group.outgrew and most <= cache.capacity_blocks


def may_start(state: CoreState, group: Group, num_cached: int, builder: PlanBuilder) -> bool:
    """True if the group has seats there, and free blocks for the rest of its prompt."""
    _, left = builder.left.get(state.number, (0, 0.0))
    need = state.cache.ledger.blocks_for(math.ceil(group.live[0].num_tokens - num_cached + left))
    return has_seats(state, group, builder) and need <= state.cache.num_free_gpu


def fits_elsewhere(group: Group, state: CoreState, builder: PlanBuilder) -> bool:
    """True if another worker group has room for a waiting group now, so that none needs to be preempted for it here."""
    others = [s for s in state.shared.workers if s is not state and s.takes_work]
    return any(may_start(s, group, s.cache.num_cached_tokens(group.live[0]), builder) for s in others)


# --- leaving groups to others ----------------------------------------------------------------------------------------


def _still_left_to(group: Group, state: CoreState, builder: PlanBuilder) -> CoreState | None:
    """The other worker group to which the group was left, if that has not planned since, and the time is not over."""
    if group.left_to is None or builder.now > group.left_until:
        return None
    number, num_plans = group.left_to
    other = state.shared.workers[number]
    return other if number != state.number and other.takes_work and other.num_plans == num_plans else None


def _may_leave(group: Group, seconds: float, builder: PlanBuilder) -> bool:
    """True if the group may be left to others: for so long since the first time that it was."""
    if group.passed_at is None:
        group.passed_at = builder.now
    group.left_until = group.passed_at + seconds
    return builder.now <= group.left_until


def _leave_to(other: CoreState, group: Group, builder: PlanBuilder) -> AdmissionVerdict:
    """SKIP, with the group counted as queued on that worker group."""
    num_seqs, num_tokens = builder.left.get(other.number, (0, 0.0))
    builder.left[other.number] = num_seqs + group.max_num_running_seqs, num_tokens + group.live[0].num_tokens
    group.left_to = other.number, other.num_plans
    return _skip(builder)


def _skip(builder: PlanBuilder) -> AdmissionVerdict:
    """SKIP; STOP once so many groups were left that the rest of the queue is not examined."""
    builder.num_passed += 1
    return AdmissionVerdict.SKIP if builder.num_passed < _MOST_PASSED else AdmissionVerdict.STOP


PLACEMENTS: dict[str, AdmissionPart] = {
    "prefix_affinity": EarliestEnd(sees_prefixes=True),
    "least_work": EarliestEnd(sees_prefixes=False),
    "round_robin": RoundRobin(),
}
"""By the word of the policy's key `placement`. They keep no state of their own."""
