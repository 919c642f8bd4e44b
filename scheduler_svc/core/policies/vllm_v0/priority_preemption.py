"""Preempt running groups for a higher-priority waiting group, as in vLLM 0.6.3."""

from block_manager.cache_rules import AllocStatus, PrefixHit
from scheduler_svc.core.parts.interfaces import Ordering
from scheduler_svc.core.parts.phases import Preemption
from scheduler_svc.core.parts.placement import fits_elsewhere
from scheduler_svc.core.parts.preemption import SWAP
from scheduler_svc.core.plan_builder import PlanBuilder
from scheduler_svc.core.policies.vllm_v0.shares import WholePrompts
from scheduler_svc.core.reasons import Reason
from scheduler_svc.core.request import Group, QueueKind
from scheduler_svc.core.state import CoreState


class PriorityPreemption:
    """Sort both queues; preempt the last running group while it ranks below the head of waiting and the head does
    not fit.

    The head itself starts in the next step. Swapped-out victims go to the swapped queue; vLLM 0.6.3 loses them.
    """

    def __init__(self, ordering: Ordering, shares: WholePrompts, preemption: Preemption) -> None:
        self._ordering = ordering
        self._shares = shares
        self._preemption = preemption

    def make_room(self, state: CoreState, builder: PlanBuilder) -> None:
        """Preempt groups for the head of waiting."""
        state.running.sort(key=self._ordering.key)
        if self._may_make_room(state, builder):
            head = state.waiting.pop()
            num_tokens = self._shares.num_new_tokens(head, state, builder)
            while state.running and self._outranked(state.running[-1], head):
                if self._fits(head, num_tokens, state, builder):
                    break
                builder.in_need = head
                self._push_out(state.running.pop(), state, builder)
            state.waiting.push_front(head)
            if builder.preempted:
                state.journal.stop(head, Reason.MADE_ROOM, preempted=len(builder.preempted))
        state.waiting.sort(self._ordering)

    @staticmethod
    def _may_make_room(state: CoreState, builder: PlanBuilder) -> bool:
        if not len(state.waiting) or state.guard.favourite is not None or not state.takes_work:
            return False
        return not fits_elsewhere(state.waiting.peek(), state, builder)

    def _outranked(self, runner: Group, head: Group) -> bool:
        return self._ordering.key(runner) > self._ordering.key(head)

    @staticmethod
    def _fits(head: Group, num_tokens: int, state: CoreState, builder: PlanBuilder) -> bool:
        return (
            num_tokens > 0
            and state.cache.can_admit(head.live, PrefixHit(), num_tokens) is AllocStatus.OK
            and builder.budget.can_schedule(num_tokens, head.max_num_running_seqs)
        )

    def _push_out(self, victim: Group, state: CoreState, builder: PlanBuilder) -> None:
        request_id = victim.request.request_id
        builder.budget.subtract_num_tokens(request_id, self._shares.num_new_tokens(victim, state, builder))
        builder.budget.subtract_num_seqs(request_id, victim.max_num_running_seqs)
        if self._preemption.preempt(victim, state, builder) == SWAP:
            victim.place = QueueKind.SWAPPED
            state.swapped.append(victim)
        else:
            victim.place = QueueKind.WAITING
            state.waiting.push_front(victim)
