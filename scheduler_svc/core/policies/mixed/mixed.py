"""Phases of vLLM V1: running groups first, then waiting ones, under one token budget.

Prefill and decode are not distinguished: each step computes tokens of a sequence that are known and not
computed yet. The size of a chunk of a prompt (chunked prefill): `parts/step_shares`.
"""

from block_manager.cache_rules import AllocStatus, PrefixHit
from scheduler_svc.core.parts.interfaces import Progress
from scheduler_svc.core.parts.phases import AdmissionPart, AdmissionVerdict, Preemption, first_refusal, gates_open
from scheduler_svc.core.parts.progress_guard import STUCK
from scheduler_svc.core.parts.step_shares import Share, StepShares
from scheduler_svc.core.plan_builder import PlanBuilder
from scheduler_svc.core.reasons import Reason
from scheduler_svc.core.request import Group, QueueKind, Sequence, SequenceStatus
from scheduler_svc.core.state import CoreState


class MixedRunning:
    """Give every running group, in order, its share of the step.

    When blocks run out, victims are preempted until the group fits or is the victim itself.
    """

    def __init__(self, shares: StepShares, preemption: Preemption, progress: Progress) -> None:
        self._shares = shares
        self._preemption = preemption
        self._progress = progress

    def run(self, state: CoreState, builder: PlanBuilder) -> None:
        """Schedule running groups in order."""
        position = 0
        while position < len(state.running) and not builder.budget.is_spent:
            group = state.running[position]
            shares = self._shares.running(group, state, builder)
            if shares:
                position -= self._make_room(group, shares, state, builder)
                if group.place is not QueueKind.RUNNING:
                    break
                for sequence, num_tokens in shares:
                    self.schedule(sequence, num_tokens, state, builder)
            position += 1

    def schedule(self, sequence: Sequence, num_tokens: int, state: CoreState, builder: PlanBuilder) -> None:
        """Allocate blocks for `num_tokens`, which must be available, and add the sequence to the plan."""
        builder.extend(sequence, num_tokens, state)
        beyond = sequence.num_computed_tokens + num_tokens - sequence.num_tokens - sequence.num_placeholders
        num_drafts = max(0, beyond) if sequence.draft_token_ids else 0
        sequence.draft_token_ids = []
        builder.add(sequence, num_tokens, num_drafts)
        builder.budget.take(num_tokens)

    def _make_room(self, group: Group, shares: list[Share], state: CoreState, builder: PlanBuilder) -> int:
        """Preempt until the group fits or is preempted itself. Returns how many victims were already scheduled in
        this step.
        """
        num_withdrawn = 0
        while not self._fits(shares, state):
            if state.guard.is_hopeless(group, alone=len(state.running) == 1) and not state.is_largest:
                group.outgrew = state.cache.capacity_blocks
            elif state.guard.is_hopeless(group, alone=len(state.running) == 1):
                builder.ended += state.retire_group(group, SequenceStatus.FINISHED_IGNORED, STUCK)
                break
            candidates = state.guard.victims(state.running)
            victim = self._preemption.victim(candidates, group, state) if candidates else group
            withdrawn = [builder.withdraw(sequence, state) for sequence in victim.live]
            builder.budget.give_back(sum(withdrawn))
            num_withdrawn += any(withdrawn)
            builder.in_need = group
            leave(victim, self._preemption, state, builder)
            builder.num_preempted += 1
            for sequence in victim.live:
                self._progress.on_preempted(sequence)
            if victim is group:
                break
        return num_withdrawn

    @staticmethod
    def _fits(shares: list[Share], state: CoreState) -> bool:
        """Whether blocks suffice; all shares of a group are equal (`joint_shares`)."""
        return state.cache.can_extend([s for s, _ in shares], shares[0][1])


class CollectLoras:
    """Collect the adapters of all running groups, for `LoraSlots`."""

    def run(self, state: CoreState, builder: PlanBuilder) -> None:
        """Add the adapters of running groups to the plan."""
        builder.lora_ids.update((g.request.lora_id, None) for g in state.running if g.request.lora_id > 0)


class MixedWaiting:
    """Start waiting groups, head first, unless this step preempted a group."""

    def __init__(self, shares: StepShares, admission: list[AdmissionPart], progress: Progress) -> None:
        self._shares = shares
        self._admission = admission
        self._progress = progress

    def run(self, state: CoreState, builder: PlanBuilder) -> None:
        """Start waiting groups in order."""
        if not len(state.waiting):
            return
        if builder.num_preempted:
            state.journal.stop_all(QueueKind.WAITING, Reason.STEP_PREEMPTS, preempted=len(builder.preempted))
            return
        skipped: list[Group] = []
        num_started = self._start_in_order(skipped, state, builder)
        if builder.budget.is_spent and len(state.waiting):
            state.journal.stop(state.waiting.peek(), Reason.TOKEN_BUDGET, **builder.budget.shortage())
        for group in reversed(skipped):
            state.waiting.push_front(group)
        for check in self._admission:
            check.close(num_started)

    def _start_in_order(self, skipped: list[Group], state: CoreState, builder: PlanBuilder) -> int:
        """Start groups and return how many. Groups passed over are removed from the queue into `skipped`."""
        num_started = 0
        while len(state.waiting) and not builder.budget.is_spent and gates_open(self._admission, state, builder):
            group = state.guard.next_of(state.waiting, QueueKind.WAITING)
            if group is None:
                state.journal.stop_all(QueueKind.WAITING, Reason.MAKES_WAY)
                break
            if state.is_largest and self._progress.may_resume(group.live[0]) and never_fits(group, state):
                give_up(group, state, builder)
                continue
            verdict = first_refusal(self._admission, group, state, builder)
            if verdict is AdmissionVerdict.ENTER:
                verdict = self._start(group, state, builder)
            if verdict is AdmissionVerdict.STOP or (
                verdict is AdmissionVerdict.SKIP and group is state.guard.favourite
            ):
                break
            num_started += verdict is AdmissionVerdict.ENTER
            if verdict is AdmissionVerdict.SKIP:
                skipped.append(state.waiting.pop())
        return num_started

    def _start(self, group: Group, state: CoreState, builder: PlanBuilder) -> AdmissionVerdict:
        live = group.live
        first = live[0]
        if not self._progress.may_resume(first):
            state.journal.stop(group, Reason.RESULT_PENDING)
            return AdmissionVerdict.STOP
        hit = state.cache.lookup(first)
        builder.lookups.append((group.request.request_id, hit.num_tokens))
        num_wanted = self._shares.wanted_to_start(first, hit, state)
        num_tokens = self._shares.starting(num_wanted, state, builder)
        if not num_tokens:
            state.journal.stop(group, Reason.TOKEN_BUDGET, **builder.budget.shortage(num_wanted))
            return AdmissionVerdict.STOP
        status = state.cache.can_admit(live, hit, num_tokens)
        if status is AllocStatus.NEVER:
            if not state.is_largest:
                return AdmissionVerdict.SKIP
            give_up(group, state, builder)  # with a sliding window, by its first chunk
            return AdmissionVerdict.REJECT
        if status is AllocStatus.LATER:
            need = state.cache.num_blocks_to_admit(live, hit, num_tokens)
            state.journal.stop(group, Reason.NEED_BLOCKS, **state.shortage(need))
            return AdmissionVerdict.STOP
        state.cache.admit(live, hit, num_tokens)
        self._enter(live, hit.num_tokens, state, builder)
        self._schedule(live, num_tokens, builder)
        return AdmissionVerdict.ENTER

    @staticmethod
    def _schedule(live: list[Sequence], num_tokens: int, builder: PlanBuilder) -> None:
        """Schedule the first sequence. Siblings compute the rest in later steps, and all sample together at the end."""
        first, *siblings = live
        if siblings:
            num_tokens = min(num_tokens, first.num_tokens - 1 - first.num_computed_tokens)
        builder.budget.take(num_tokens)
        if num_tokens:
            builder.add(first, num_tokens)

    @staticmethod
    def _enter(live: list[Sequence], num_cached_tokens: int, state: CoreState, builder: PlanBuilder) -> None:
        first, *siblings = live
        group = first.group
        first.num_computed_tokens = num_cached_tokens
        state.waiting.remove(group)
        state.running.append(group)
        state.start(group, builder.now)
        if group.request.lora_id > 0:
            builder.lora_ids[group.request.lora_id] = None
        for sibling in siblings:
            sibling.num_computed_tokens = state.num_shared_at_start(first)
        if group.request.num_cached_tokens is None:
            group.request.num_cached_tokens = num_cached_tokens


def leave(group: Group, preemption: Preemption, state: CoreState, builder: PlanBuilder) -> None:
    """Preempt a running group: move it to the front of the waiting queue, or to the host."""
    state.take_out(group)
    if preemption.preempt(group, state, builder) == "swap":
        group.place = QueueKind.SWAPPED
        state.swapped.append(group)
    else:
        group.place = QueueKind.WAITING
        state.waiting.push_front(group)


def never_fits(group: Group, state: CoreState) -> bool:
    """Whether not even an empty cache could hold the tokens of a waiting group.

    That can become so: what forked late shares most blocks until it is preempted, then only those of the prompt.
    """
    live = group.live
    if len(live) == 1:
        return live[0].num_tokens > state.cache.capacity_tokens
    return state.cache.can_admit(live, PrefixHit(), 1) is AllocStatus.NEVER


def give_up(group: Group, state: CoreState, builder: PlanBuilder) -> None:
    """End a group that never fits, so that those behind it are served."""
    live, most = group.live, state.cache.capacity_blocks
    num_tokens = max(sequence.num_tokens for sequence in live)
    need, what = state.cache.ledger.blocks_for(num_tokens), f"{num_tokens} tokens"
    if len(live) > 1:
        need = state.cache.num_blocks_to_admit(live, PrefixHit(), live[0].num_tokens)
        what = f"{len(live)} sequences of up to {num_tokens} tokens together"
    why = f"its {what} need {need} cache blocks, and there are {most}; ask for fewer or shorter outputs"
    builder.ended += state.retire_group(group, SequenceStatus.FINISHED_IGNORED, why)
