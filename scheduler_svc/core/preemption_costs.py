"""Preemption by cost: the least important leaves, among equals who loses least, and in the cheaper way."""

from scheduler_svc.core.costs import CostBook
from scheduler_svc.core.ordering_aged import class_of
from scheduler_svc.core.parts import Ordering
from scheduler_svc.core.preemption import RECOMPUTE, SWAP, Recompute, SwapOrRecompute, newest
from scheduler_svc.core.request import Group, Sequence
from scheduler_svc.core.state import CoreState
from scheduler_svc.core.step_draft import StepDraft


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
