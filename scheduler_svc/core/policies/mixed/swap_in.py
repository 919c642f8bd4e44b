"""Swap-in under mixed phases: swapped groups resume before lower-ranked new prompts and after higher-ranked ones."""

from block_manager.cache_rules import AllocStatus
from scheduler_svc.core import lost_work
from scheduler_svc.core.parts.admission import OpenGate
from scheduler_svc.core.parts.interfaces import Ordering
from scheduler_svc.core.parts.phases import AdmissionPart, AdmissionVerdict, first_refusal
from scheduler_svc.core.parts.step_shares import StepShares
from scheduler_svc.core.plan_builder import PlanBuilder
from scheduler_svc.core.policies.mixed.mixed import MixedRunning
from scheduler_svc.core.reasons import Reason
from scheduler_svc.core.request import Group, QueueKind, SequenceStatus
from scheduler_svc.core.state import CoreState


class MixedSwapIns:
    """Phase between running and waiting: swap groups in, highest-ranked first, and schedule them at once.

    All blocks of a group are swapped in, or none. No group is swapped in during a step that preempted one, nor
    while a step from before its swap is in flight: the token that it yields is not known yet, and the worker
    feeds it back only to sequences that it still holds.
    """

    def __init__(
        self, ordering: Ordering, shares: StepShares, admission: list[AdmissionPart], running: MixedRunning
    ) -> None:
        self._ordering = ordering
        self._shares = shares
        self._admission = admission
        self._running = running

    def run(self, state: CoreState, builder: PlanBuilder) -> None:
        """Swap in groups in order."""
        state.swapped.sort(key=self._ordering.key)
        if state.swapped and builder.preempted:
            state.journal.stop(state.swapped[0], Reason.STEP_PREEMPTS, preempted=len(builder.preempted))
            return
        skipped: list[Group] = []
        while state.swapped and not builder.budget.is_spent:
            group = state.guard.favourite or state.swapped[0]
            if group.place is not QueueKind.SWAPPED:
                state.journal.stop_all(QueueKind.SWAPPED, Reason.MAKES_WAY)
                break
            verdict = self._check(group, state, builder)
            if verdict is AdmissionVerdict.ENTER:
                verdict = self._enter(group, state, builder)
            if verdict is AdmissionVerdict.STOP or (
                verdict is AdmissionVerdict.SKIP and group is state.guard.favourite
            ):
                break
            if verdict is AdmissionVerdict.SKIP:
                state.swapped.remove(group)
                skipped.append(group)
        state.swapped[:0] = skipped
        if state.swapped and builder.budget.is_spent:
            state.journal.stop(state.swapped[0], Reason.TOKEN_BUDGET, **builder.budget.shortage())

    def _check(self, group: Group, state: CoreState, builder: PlanBuilder) -> AdmissionVerdict:
        if any(sequence.num_placeholders for sequence in group.live):
            state.journal.stop(group, Reason.RESULT_PENDING)
            return AdmissionVerdict.STOP
        if len(state.waiting) and group is not state.guard.favourite and self._is_behind(group, state):
            state.journal.stop(group, Reason.OUTRANKED)
            return AdmissionVerdict.STOP
        status = state.cache.can_swap_in(group.live)
        if status is AllocStatus.NEVER and not state.is_largest:
            lost_work.outgrow(group, state)
            return AdmissionVerdict.REJECT
        if status is AllocStatus.NEVER:
            why = f"its blocks no longer fit the device, which holds {state.cache.capacity_tokens} tokens; shorten the prompt"
            builder.ended += state.retire_group(group, SequenceStatus.FINISHED_IGNORED, why)
            return AdmissionVerdict.REJECT
        refusal = first_refusal(self._admission, group, state, builder)
        if refusal is AdmissionVerdict.ENTER and status is AllocStatus.LATER:
            numbers = state.shortage(state.cache.num_blocks_to_swap_in(group.live))
            state.journal.stop(group, Reason.NEED_BLOCKS, **numbers)
            return AdmissionVerdict.STOP
        return refusal

    def _is_behind(self, group: Group, state: CoreState) -> bool:
        """True if a higher-ranked group waits for its first blocks."""
        head = state.waiting.peek()
        return self._ordering.key(head) < self._ordering.key(group) or state.account.owes(group, head)

    def _enter(self, group: Group, state: CoreState, builder: PlanBuilder) -> AdmissionVerdict:
        shares = self._shares.running(group, state, builder)
        if not shares:
            state.journal.stop(group, Reason.TOKEN_BUDGET, **builder.budget.shortage(len(group.live)))
            return AdmissionVerdict.STOP
        state.swapped.remove(group)
        builder.swap_in.add(group.request.request_id, state.cache.swap_in(group.live))
        state.running.append(group)
        state.start(group, builder.now)
        if group.request.lora_id > 0:
            builder.lora_ids[group.request.lora_id] = None
        for sequence, num_tokens in shares:
            self._running.schedule(sequence, num_tokens, state, builder)
        return AdmissionVerdict.ENTER


class BehindSwapped(OpenGate):
    """Admission check: no group starts before a higher-ranked one that is swapped out."""

    def __init__(self, ordering: Ordering) -> None:
        self._ordering = ordering

    def check(self, group: Group, state: CoreState, builder: PlanBuilder) -> AdmissionVerdict:
        """STOP if a higher-ranked group is swapped out."""
        if not state.swapped or group is state.guard.favourite or group is builder.favoured:
            return AdmissionVerdict.ENTER
        key = self._ordering.key(group)
        num_before = sum(self._ordering.key(g) < key and not state.account.owes(g, group) for g in state.swapped)
        if not num_before:
            return AdmissionVerdict.ENTER
        state.journal.stop(group, Reason.SWAPPED_FIRST, swapped=num_before)
        return AdmissionVerdict.STOP
