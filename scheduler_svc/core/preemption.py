"""Preemptions: who leaves when blocks run out, and how it leaves."""

from typing import Protocol

from scheduler_svc.core.errors import StepFailed
from scheduler_svc.core.parts import Ordering
from scheduler_svc.core.reasons import Reason
from scheduler_svc.core.request import Group, Place, SequenceStatus
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
