"""Preemption: which group is preempted when blocks run out, and whether it is recomputed or swapped."""

from typing import Protocol

from scheduler_svc.core.errors import StepFailed
from scheduler_svc.core.parts.costs import CostBook
from scheduler_svc.core.parts.interfaces import Ordering
from scheduler_svc.core.plan_builder import PlanBuilder
from scheduler_svc.core.reasons import Reason
from scheduler_svc.core.request import Group, QueueKind, Sequence, SequenceStatus
from scheduler_svc.core.state import CoreState, leave_to_siblings

RECOMPUTE = "recompute"
SWAP = "swap"


def newest(candidates: list[Group]) -> Group:
    """The group that started last."""
    return candidates[-1]


class LastInOrder:
    """Chooses the group that is last in an ordering."""

    def __init__(self, ordering: Ordering) -> None:
        self._ordering = ordering

    def __call__(self, candidates: list[Group]) -> Group:
        """The first of those with the largest key."""
        return max(candidates, key=self._ordering.key)


class VictimChoice(Protocol):
    """Chooses the victim."""

    def __call__(self, candidates: list[Group]) -> Group:
        """One of the candidates (not empty, in running order)."""


class Recompute:
    """Preemption by recompute: drop the victim's KV and compute it again later; generated tokens are kept."""

    def __init__(self, choose: VictimChoice) -> None:
        self._choose = choose

    def victim(self, candidates: list[Group], needy: Group, state: CoreState) -> Group:
        """The victim that the choice function names."""
        return self._choose(candidates)

    def preempt(self, group: Group, state: CoreState, builder: PlanBuilder) -> str:
        """Free all blocks of the group."""
        state.guard.on_preempted(group, state.running)
        lost = sum(sequence.num_computed_tokens for sequence in group.live)
        state.num_lost_tokens += lost
        state.journal.leaves(
            group, QueueKind.WAITING, Reason.PREEMPTED, mode=RECOMPUTE, lost_tokens=lost, by=_by(builder)
        )
        for sequence in group.live:
            state.cache.release(sequence)
            state.leave_worker(sequence)
            sequence.status = SequenceStatus.PREEMPTED
            sequence.num_preemptions += 1
            sequence.restart()
        builder.preempted.append((group.request.request_id, RECOMPUTE))
        return RECOMPUTE


class SwapOrRecompute(Recompute):
    """Preemption in the configured mode; by default groups of one sequence are recomputed and larger ones swapped.

    When the host is full the group is recomputed, or with `fails_step` the whole step fails, as in vLLM v0.
    """

    def __init__(self, choose: VictimChoice, mode: str | None, *, fails_step: bool) -> None:
        super().__init__(choose)
        self._mode = mode
        self._fails_step = fails_step

    def preempt(self, group: Group, state: CoreState, builder: PlanBuilder) -> str:
        """Preempt the group. StepFailed if it must be swapped, the host is full and `fails_step` is set."""
        mode = self._mode or (RECOMPUTE if group.max_num_running_seqs == 1 else SWAP)
        if mode == RECOMPUTE or group.starts_over:
            return super().preempt(group, state, builder)
        if state.cache.can_swap_out(group.live):
            return self._swap_out(group, state, builder)
        if self._fails_step:
            raise StepFailed(group.request.request_id, list(builder.preempted))
        return super().preempt(group, state, builder)

    def _swap_out(self, group: Group, state: CoreState, builder: PlanBuilder) -> str:
        state.guard.on_preempted(group, state.running)
        leave_to_siblings(group)  # rules that swap each sequence separately do not keep sharing
        pairs = state.cache.swap_out(group.live)
        builder.swap_out.add(group.request.request_id, pairs)
        state.journal.leaves(group, QueueKind.SWAPPED, Reason.PREEMPTED, mode=SWAP, blocks=len(pairs), by=_by(builder))
        for sequence in group.live:
            state.leave_worker(sequence)
            sequence.status = SequenceStatus.SWAPPED
            sequence.num_preemptions += 1
        builder.preempted.append((group.request.request_id, SWAP))
        return SWAP


def _by(builder: PlanBuilder) -> str:
    """Id of the request for which the victim is preempted, "" if there is none."""
    return builder.in_need.request.request_id if builder.in_need is not None else ""


class LeastLost:
    """Preempt only groups behind the one in need in `ordering`, so that none displaces one ahead of it.

    Among those, the lowest priority class goes first, and within it the group that loses least: tokens to
    recompute, not counting those in blocks that others share, or blocks to copy. `mode`: "recompute" or "swap"
    as configured, None = the cheaper by measured cost. A group is recomputed when the host is full or costs are
    unknown; while the cost of computing is known and that of copying is not, one swap is made to measure it.
    """

    def __init__(self, ordering: Ordering, costs: CostBook, mode: str | None) -> None:
        self._ordering = ordering
        self._costs = costs
        self._mode = mode
        self._recompute = Recompute(newest)
        self._swap = SwapOrRecompute(newest, SWAP, fails_step=False)

    def victim(self, candidates: list[Group], needy: Group, state: CoreState) -> Group:
        """The candidate to preempt, or `needy` if no candidate is behind it.

        A group that the progress guard protects from preemption is not among the candidates; it may preempt any
        of them.
        """
        others = [group for group in candidates if group is not needy]
        if needy in candidates:
            key = self._ordering.key(needy)
            others = [group for group in others if self._ordering.key(group) > key]
        if not others:
            return needy
        lowest = max(group.request.priority_class for group in others)
        return min(
            (group for group in others if group.request.priority_class == lowest),
            key=lambda group: (self.loss(group, state), -group.ticket),
        )

    def preempt(self, group: Group, state: CoreState, builder: PlanBuilder) -> str:
        """Preempt by the cheaper mode, or the configured one."""
        part = self._swap if self.mode(group, state, builder) == SWAP else self._recompute
        return part.preempt(group, state, builder)

    def mode(self, group: Group, state: CoreState, builder: PlanBuilder) -> str:
        """The mode it would be preempted by now.

        Recompute if a copy-on-write copy of this step was withdrawn: the target block has no contents to swap.
        """
        if self._mode == RECOMPUTE or group.starts_over or any(s.name in builder.torn for s in group.live):
            return RECOMPUTE
        if self._mode == SWAP:
            return SWAP
        return SWAP if self._swap_s(group, state) < self._compute_s(group, state) else RECOMPUTE

    def loss(self, group: Group, state: CoreState) -> float:
        """Cost of preempting the group: seconds, or tokens while costs are unknown."""
        if not self._costs.now.are_known or self._mode == RECOMPUTE:
            return num_lost_tokens(group, state)
        swap_s, compute_s = self._swap_s(group, state), self._compute_s(group, state)
        if group.starts_over:
            return compute_s
        return swap_s if self._mode == SWAP else min(swap_s, compute_s)

    def _compute_s(self, group: Group, state: CoreState) -> float:
        return self._costs.now.compute_s(num_lost_tokens(group, state))

    def _swap_s(self, group: Group, state: CoreState) -> float:
        tables = state.cache.ledger.tables
        return self._costs.now.swap_s(len({block for s in group.live for block in tables.get(s.name, ())}))


def num_lost_tokens(group: Group, state: CoreState) -> int:
    """Tokens that it would recompute: computed ones, except those in leading blocks that other sequences share."""
    return sum(max(0, s.num_computed_tokens - _num_shared_tokens(s, state)) for s in group.live)


def _num_shared_tokens(sequence: Sequence, state: CoreState) -> int:
    """Tokens in leading blocks with other holders; 0 where they could not be found again by a lookup."""
    if not state.limits.prefix_caching or sequence.no_cache_reuse:
        return 0
    return state.cache.ledger.num_shared_tokens(sequence.name)
