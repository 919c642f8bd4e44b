"""Admission of waiting groups under v0. Strict FCFS: a prompt over budget blocks those behind it."""

from block_manager.cache_rules import AllocStatus, PrefixHit
from scheduler_svc.core.parts.phases import AdmissionPart, AdmissionVerdict, first_refusal, gates_open
from scheduler_svc.core.plan_builder import PlanBuilder
from scheduler_svc.core.policies.vllm_v0.shares import ScheduledGroup, WholePrompts, pending, shared_prompt_tokens
from scheduler_svc.core.reasons import Reason
from scheduler_svc.core.request import Group, QueueKind, SequenceStatus
from scheduler_svc.core.state import CoreState

_NO_HIT = PrefixHit()


class Prefills:
    """Start waiting groups that fit blocks and budget. The caller adds them to `running` and to the plan."""

    def __init__(self, shares: WholePrompts, admission: list[AdmissionPart]) -> None:
        self._shares = shares
        self._admission = admission

    def start(self, state: CoreState, builder: PlanBuilder) -> list[ScheduledGroup]:
        """Start groups; returns them in order."""
        started: list[ScheduledGroup] = []
        skipped: list[Group] = []
        while gates_open(self._admission, state, builder) and len(state.waiting):
            group = state.guard.next_of(state.waiting, QueueKind.WAITING)
            if group is None:
                state.journal.stop_all(QueueKind.WAITING, Reason.MAKES_WAY)
                break
            num_tokens = self._shares.num_new_tokens(group, state, builder)
            verdict = self._check(group, num_tokens, state, builder)
            if verdict is AdmissionVerdict.STOP or (
                verdict is AdmissionVerdict.SKIP and group is state.guard.favourite
            ):
                break
            if verdict is AdmissionVerdict.SKIP:
                skipped.append(state.waiting.pop())
            elif verdict is AdmissionVerdict.ENTER:
                started.append(self._enter(group, num_tokens, state, builder))
        for group in reversed(skipped):
            state.waiting.push_front(group)
        for check in self._admission:
            check.close(len(started))
        return started

    def _check(self, group: Group, num_tokens: int, state: CoreState, builder: PlanBuilder) -> AdmissionVerdict:
        if why := self._never_fits(group, num_tokens, state):
            builder.ended += state.retire_group(group, SequenceStatus.FINISHED_IGNORED, why)
            return AdmissionVerdict.REJECT
        lookahead = self._shares.num_lookahead(in_prefill=True)
        num_new = min(num_tokens, pending(group.live[0]))
        status = state.cache.can_admit(group.live, _NO_HIT, num_new, lookahead)
        if status is AllocStatus.LATER:
            need = state.cache.num_blocks_to_admit(group.live, _NO_HIT, num_new, lookahead)
            state.journal.stop(group, Reason.NEED_BLOCKS, **state.shortage(need))
            return AdmissionVerdict.STOP
        if status is AllocStatus.NEVER and not state.is_largest:
            return AdmissionVerdict.SKIP
        if status is AllocStatus.NEVER:
            why = f"its {num_tokens} tokens need more blocks than the {state.cache.capacity_tokens} tokens of the cache"
            builder.ended += state.retire_group(group, SequenceStatus.FINISHED_IGNORED, why)
            return AdmissionVerdict.REJECT
        refusal = first_refusal(self._admission, group, state, builder)
        if refusal is not AdmissionVerdict.ENTER:
            return refusal
        return fits_budget(group, num_tokens, self._shares.least(group, state), state, builder)

    def _never_fits(self, group: Group, num_tokens: int, state: CoreState) -> str:
        limit = group.request.long_lora_max_len or self._shares.prompt_limit(state)
        alone = len(group.live) == 1
        longest = num_tokens if alone else max(s.num_tokens for s in group.live)
        if longest > limit:
            return f"its {longest} tokens are more than the {limit} that a prompt may have; shorten it"
        return ""

    def _enter(self, group: Group, num_tokens: int, state: CoreState, builder: PlanBuilder) -> ScheduledGroup:
        state.waiting.remove(group)
        first = min(num_tokens, pending(group.live[0]))
        state.cache.admit(group.live, _NO_HIT, first, self._shares.num_lookahead(in_prefill=True))
        for sibling in group.live[1:]:
            sibling.num_shared_tokens = shared_prompt_tokens(group, state)
        state.start(group, builder.now)
        if group.request.lora_id > 0:
            builder.lora_ids[group.request.lora_id] = None
        builder.budget.add_num_tokens(group.request.request_id, num_tokens)
        builder.budget.add_num_seqs(group.request.request_id, group.max_num_running_seqs)
        return ScheduledGroup(group, num_tokens, is_prefill=True)


def fits_budget(group: Group, num_tokens: int, least: int, state: CoreState, builder: PlanBuilder) -> AdmissionVerdict:
    """ENTER if the step has room for so many tokens and for the group's sequences, else STOP.

    `least`: the fewest tokens it can start with, recorded as needed where the budget has fewer.
    """
    budget, num_seqs = builder.budget, group.max_num_running_seqs
    if num_tokens > 0 and budget.can_schedule(num_tokens, num_seqs):
        return AdmissionVerdict.ENTER
    if num_tokens > 0 and budget.num_tokens + num_tokens <= budget.token_budget:
        state.journal.stop(group, Reason.MAX_SEQS, need=num_seqs, running=budget.num_seqs, limit=budget.max_num_seqs)
    else:
        state.journal.stop(group, Reason.TOKEN_BUDGET, **budget.shortage(max(num_tokens, least)))
    return AdmissionVerdict.STOP
