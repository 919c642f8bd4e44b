"""Swap-in under v0: head first, all blocks of a group or none."""

from block_manager.cache_rules import AllocStatus
from scheduler_svc.core import lost_work
from scheduler_svc.core.parts.phases import AdmissionPart, AdmissionVerdict, first_refusal
from scheduler_svc.core.plan_builder import PlanBuilder
from scheduler_svc.core.policies.vllm_v0.decode import extend_all
from scheduler_svc.core.policies.vllm_v0.prefill import fits_budget
from scheduler_svc.core.policies.vllm_v0.shares import ScheduledGroup, WholePrompts
from scheduler_svc.core.reasons import Reason
from scheduler_svc.core.request import Group, QueueKind, SequenceStatus
from scheduler_svc.core.state import CoreState


class SwapIns:
    """Swap in groups that fit. The caller adds them to `running` and to the plan.

    Swapped prompts are computed whole even where prompts are chunked, so `shares` is always `WholePrompts`.
    `leaks_ignored`: the host blocks of groups that can never be swapped in are leaked, as in vLLM 0.6.3.
    """

    def __init__(self, shares: WholePrompts, admission: list[AdmissionPart], *, leaks_ignored: bool = False) -> None:
        self._shares = shares
        self._admission = admission
        self._leaks_ignored = leaks_ignored

    def bring_in(self, state: CoreState, builder: PlanBuilder) -> list[ScheduledGroup]:
        """Swap in groups; returns them in order."""
        back: list[ScheduledGroup] = []
        skipped: list[Group] = []
        while state.swapped:
            group = state.guard.next_of(state.swapped, QueueKind.SWAPPED)
            if group is None:
                state.journal.stop_all(QueueKind.SWAPPED, Reason.MAKES_WAY)
                break
            num_tokens = self._shares.num_new_tokens(group, state, builder)
            verdict = self._check(group, num_tokens, state, builder)
            if verdict is AdmissionVerdict.STOP or (
                verdict is AdmissionVerdict.SKIP and group is state.guard.favourite
            ):
                break
            if verdict is AdmissionVerdict.SKIP:
                skipped.append(state.swapped.pop(0))
            elif verdict is AdmissionVerdict.ENTER:
                back.append(self._enter(group, num_tokens, state, builder))
        state.swapped[:0] = skipped
        return back

    def _check(self, group: Group, num_tokens: int, state: CoreState, builder: PlanBuilder) -> AdmissionVerdict:
        num_lookahead = self._shares.num_lookahead(in_prefill=group.in_prefill)
        status = state.cache.can_swap_in(group.live, num_lookahead)
        if status is AllocStatus.LATER:
            numbers = state.shortage(state.cache.num_blocks_to_swap_in(group.live, num_lookahead))
            state.journal.stop(group, Reason.NEED_BLOCKS, **numbers)
            return AdmissionVerdict.STOP
        if status is AllocStatus.NEVER and not state.is_largest:
            lost_work.outgrow(group, state)
            return AdmissionVerdict.REJECT
        if status is AllocStatus.NEVER:
            why = f"its blocks no longer fit the device, which holds {state.cache.capacity_tokens} tokens; shorten the prompt"
            end = state.end if self._leaks_ignored else state.retire
            builder.ended += [end(sequence, SequenceStatus.FINISHED_IGNORED, why) for sequence in group.live]
            return AdmissionVerdict.REJECT
        refusal = first_refusal(self._admission, group, state, builder)
        if refusal is not AdmissionVerdict.ENTER:
            return refusal
        return fits_budget(group, num_tokens, self._shares.least(group, state), state, builder)

    def _enter(self, group: Group, num_tokens: int, state: CoreState, builder: PlanBuilder) -> ScheduledGroup:
        request_id = group.request.request_id
        state.swapped.remove(group)
        builder.swap_in.add(request_id, state.cache.swap_in(group.live))
        state.start(group, builder.now)
        extend_all(group, num_tokens, self._shares, state, builder)
        if group.request.lora_id > 0:
            builder.lora_ids[group.request.lora_id] = None
        builder.budget.add_num_tokens(request_id, num_tokens)
        builder.budget.add_num_seqs(request_id, group.max_num_running_seqs)
        return ScheduledGroup(group, num_tokens, group.in_prefill)
