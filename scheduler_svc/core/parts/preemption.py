"""Preemptions: who leaves when blocks run out, and how it leaves."""

from typing import Protocol

from scheduler_svc.core.costs import CostBook
from scheduler_svc.core.errors import StepFailed
from scheduler_svc.core.parts.interfaces import Ordering
from scheduler_svc.core.parts.ordering import class_of
from scheduler_svc.core.reasons import Reason
from scheduler_svc.core.request import Group, Place, Sequence, SequenceStatus
from scheduler_svc.core.state import CoreState, leave_to_siblings
from scheduler_svc.core.step_draft import StepDraft

RECOMPUTE = "recompute"
SWAP = "swap"


def newest(candidates: list[Group]) -> Group:
    """The last that started (R60, R130)."""
    return candidates[-1]


class LastInOrder:
    """The one that comes last in an ordering (R130)."""

    def __init__(self, ordering: Ordering) -> None:
        self._ordering = ordering

    def __call__(self, candidates: list[Group]) -> Group:
        """The first of those with the largest key."""
        return max(candidates, key=self._ordering.key)


class Who(Protocol):
    """Chooses the victim."""

    def __call__(self, candidates: list[Group]) -> Group:
        """One of them (not empty), in running order."""


class Recompute:
    """The victim's KV is dropped and computed again later; generated tokens are kept (R77, R131)."""

    def __init__(self, who: Who) -> None:
        self._who = who

    def victim(self, candidates: list[Group], needy: Group, state: CoreState) -> Group:
        """Whom the choice names."""
        return self._who(candidates)

    def preempt(self, group: Group, state: CoreState, draft: StepDraft) -> str:
        """Frees all blocks of the group."""
        state.guard.on_preempted(group, state.running)
        lost = sum(sequence.num_computed_tokens for sequence in group.live)
        state.num_lost_tokens += lost
        state.journal.leaves(group, Place.WAITING, Reason.PREEMPTED, mode=RECOMPUTE, lost_tokens=lost, by=_by(draft))
        for sequence in group.live:
            state.cache.release(sequence)
            state.leave_worker(sequence)
            sequence.status = SequenceStatus.PREEMPTED
            sequence.num_preemptions += 1
            sequence.restart()
        draft.preempted.append((group.request.request_id, RECOMPUTE))
        return RECOMPUTE


class SwapOrRecompute(Recompute):
    """By what the operator says, else groups of one sequence are computed again and larger ones swapped (R76, R78).

    Where the host is full the group is computed again; `fails_step`: the whole step fails, as the recordings have it (R75).
    """

    def __init__(self, who: Who, mode: str | None, *, fails_step: bool) -> None:
        super().__init__(who)
        self._mode = mode
        self._fails_step = fails_step

    def preempt(self, group: Group, state: CoreState, draft: StepDraft) -> str:
        """StepFailed when it must be swapped, cannot, and that is to fail the step."""
        mode = self._mode or (RECOMPUTE if group.max_num_running_seqs == 1 else SWAP)
        if mode == RECOMPUTE:
            return super().preempt(group, state, draft)
        if state.cache.can_swap_out(group.live):
            return self._swap_out(group, state, draft)
        if self._fails_step:
            raise StepFailed(group.request.request_id, list(draft.preempted))
        return super().preempt(group, state, draft)

    def _swap_out(self, group: Group, state: CoreState, draft: StepDraft) -> str:
        state.guard.on_preempted(group, state.running)
        leave_to_siblings(group)  # rules that swap sequence by sequence do not keep sharing (R74)
        pairs = state.cache.swap_out(group.live)
        draft.swap_out.add(group.request.request_id, pairs)
        state.journal.leaves(group, Place.SWAPPED, Reason.PREEMPTED, mode=SWAP, blocks=len(pairs), by=_by(draft))
        for sequence in group.live:
            state.leave_worker(sequence)
            sequence.status = SequenceStatus.SWAPPED
            sequence.num_preemptions += 1
        draft.preempted.append((group.request.request_id, SWAP))
        return SWAP


def _by(draft: StepDraft) -> str:
    """Request for which the victim leaves."""
    return draft.in_need.request.request_id if draft.in_need is not None else ""


class LeastLost:
    """Victims come after the one in need in `ordering`: no less important one ever pushes out a more important one.

    Of those the lowest priority class leaves first, in it who loses least: tokens to compute again but those whose blocks others
    hold too, or blocks to copy. `mode`: the operator's "recompute" or "swap", None = the cheaper by costs. Where the host is full
    it is computed again, and while costs are not known; what computing costs being known, copying is tried once to measure it.
    """

    def __init__(self, ordering: Ordering, costs: CostBook, mode: str | None) -> None:
        self._ordering = ordering
        self._costs = costs
        self._mode = mode
        self._recompute = Recompute(newest)
        self._swap = SwapOrRecompute(newest, SWAP, fails_step=False)

    def victim(self, candidates: list[Group], needy: Group, state: CoreState) -> Group:
        """Of the candidates, or `needy` where it is the least important itself.

        Whom the progress guard keeps from being preempted takes from anybody.
        """
        others = [group for group in candidates if group is not needy]
        if needy in candidates:
            key = self._ordering.key(needy)
            others = [group for group in others if self._ordering.key(group) > key]
        if not others:
            return needy
        lowest = max(class_of(group.request) for group in others)
        return min(
            (group for group in others if class_of(group.request) == lowest),
            key=lambda group: (self.loss(group, state), -group.ticket),
        )

    def preempt(self, group: Group, state: CoreState, draft: StepDraft) -> str:
        """In the cheaper way, or as the operator said."""
        part = self._swap if self.mode(group, state, draft) == SWAP else self._recompute
        return part.preempt(group, state, draft)

    def mode(self, group: Group, state: CoreState, draft: StepDraft) -> str:
        """How it would leave now. A block whose copy was to be made in this step holds nothing that could be swapped."""
        if self._mode == RECOMPUTE or any(s.name in draft.torn for s in group.live):
            return RECOMPUTE
        if self._mode == SWAP:
            return SWAP
        return SWAP if self._swap_s(group, state) < self._compute_s(group, state) else RECOMPUTE

    def loss(self, group: Group, state: CoreState) -> float:
        """Seconds, or tokens while costs are not known."""
        if not self._costs.now.are_known or self._mode == RECOMPUTE:
            return num_lost_tokens(group, state)
        swap_s, compute_s = self._swap_s(group, state), self._compute_s(group, state)
        return swap_s if self._mode == SWAP else min(swap_s, compute_s)

    def _compute_s(self, group: Group, state: CoreState) -> float:
        return self._costs.now.compute_s(num_lost_tokens(group, state))

    def _swap_s(self, group: Group, state: CoreState) -> float:
        tables = state.cache.ledger.tables
        return self._costs.now.swap_s(len({block for s in group.live for block in tables.get(s.name, ())}))


def num_lost_tokens(group: Group, state: CoreState) -> int:
    """Tokens that it would compute again: computed ones, but those in leading blocks that somebody else holds as well."""
    return sum(max(0, s.num_computed_tokens - _num_shared_tokens(s, state)) for s in group.live)


def _num_shared_tokens(sequence: Sequence, state: CoreState) -> int:
    """In leading blocks with other holders; 0 where they could not be found again."""
    ledger = state.cache.ledger
    if not state.limits.prefix_caching or sequence.no_cache_reuse:
        return 0
    num_blocks = 0
    for block in ledger.tables.get(sequence.name, ()):
        if ledger.gpu.refs[block] < 2:
            break
        num_blocks += 1
    return num_blocks * ledger.block_size
