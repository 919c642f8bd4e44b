"""Phases of vLLM V1: running first, then waiting, all under one token budget (R127-R133).

There is no prefill and no decode: every sequence closes the gap between computed and known tokens.
"""

from scheduler_svc.core.budget import StepBudget
from scheduler_svc.core.parts import Preemption, Progress
from scheduler_svc.core.policy import Admission, Verdict, first_refusal
from scheduler_svc.core.request import Sequence, SequenceStatus
from scheduler_svc.core.state import CoreState
from scheduler_svc.core.step_draft import StepDraft


class MixedRunning:
    """Gives every running sequence, in order, as many of its pending tokens as the budget allows (R129).

    Short of blocks, victims leave until the sequence fits or is the victim itself (R130).
    """

    def __init__(self, preemption: Preemption, progress: Progress) -> None:
        self._preemption = preemption
        self._progress = progress

    def run(self, state: CoreState, budget: StepBudget, draft: StepDraft) -> None:
        """See the class."""
        position = 0
        while position < len(state.running) and not budget.is_spent:
            sequence = state.running[position]
            num_tokens = self._num_tokens(sequence, state, budget)
            if num_tokens > 0:
                if not self._make_room(sequence, num_tokens, state, budget, draft):
                    break
                position = state.running.index(sequence, max(0, position - len(draft.preempted)))
                blocks = state.cache.extend(sequence, num_tokens)
                draft.add(sequence, num_tokens, blocks, fresh=False, resumed=False)
                budget.take(num_tokens)
            position += 1

    def _num_tokens(self, sequence: Sequence, state: CoreState, budget: StepBudget) -> int:
        threshold = state.limits.long_prefill_token_threshold
        pending = self._progress.num_pending(sequence)
        if 0 < threshold < pending:
            pending = threshold
        return min(pending, budget.num_tokens_left, state.limits.max_model_len - 1 - sequence.num_computed_tokens)

    def _make_room(
        self, sequence: Sequence, num_tokens: int, state: CoreState, budget: StepBudget, draft: StepDraft
    ) -> bool:
        while not state.cache.can_extend(sequence, num_tokens):
            victim = self._preemption.victim(state.running)
            budget.give_back(draft.withdraw(victim, state))
            preempt(victim, self._preemption.mode, state, draft)
            if victim is sequence:
                return False
        return True


class MixedWaiting:
    """Starts waiting sequences, head first, unless this step preempted somebody (R132)."""

    def __init__(self, admission: list[Admission], progress: Progress) -> None:
        self._admission = admission
        self._progress = progress

    def run(self, state: CoreState, budget: StepBudget, draft: StepDraft) -> None:
        """See the class."""
        if draft.preempted or not all(part.gate(state, draft.now) for part in self._admission):
            return
        skipped: list[Sequence] = []
        while len(state.waiting) and not budget.is_spent:
            sequence = state.waiting.peek()
            verdict = first_refusal(self._admission, sequence, state)
            if verdict is Verdict.ENTER:
                verdict = self._start(sequence, state, budget, draft)
            if verdict is Verdict.STOP:
                break
            if verdict is Verdict.SKIP:
                skipped.append(state.waiting.pop())
        for sequence in reversed(skipped):
            state.waiting.push_front(sequence)

    def _start(self, sequence: Sequence, state: CoreState, budget: StepBudget, draft: StepDraft) -> Verdict:
        if sequence.num_tokens > state.cache.capacity_tokens:
            give_up(sequence, state, draft)
            return Verdict.REJECT
        hit = state.cache.lookup(sequence)
        draft.lookups.append((sequence.request.request_id, hit.num_tokens))
        num_tokens = self._progress.num_pending(sequence) - hit.num_tokens
        threshold = state.limits.long_prefill_token_threshold
        if 0 < threshold < num_tokens:
            num_tokens = threshold
        if num_tokens > budget.num_tokens_left and not state.limits.chunked_prefill:
            return Verdict.STOP
        num_tokens = min(num_tokens, budget.num_tokens_left)
        if not state.cache.can_admit(sequence, hit, num_tokens):
            return Verdict.STOP
        blocks = state.cache.admit(sequence, hit, num_tokens)
        self._enter(sequence, hit.num_tokens, state)
        draft.add(sequence, num_tokens, blocks, fresh=True, resumed=sequence.num_preemptions > 0)
        budget.take(num_tokens)
        return Verdict.ENTER

    @staticmethod
    def _enter(sequence: Sequence, num_cached_tokens: int, state: CoreState) -> None:
        state.waiting.remove(sequence)
        state.running.append(sequence)
        sequence.status = SequenceStatus.RUNNING
        sequence.num_computed_tokens = num_cached_tokens
        state.on_worker[sequence.name] = None
        if sequence.request.num_cached_tokens is None:
            sequence.request.num_cached_tokens = num_cached_tokens


def preempt(sequence: Sequence, mode: str, state: CoreState, draft: StepDraft) -> None:
    """Back to the front of waiting, to be computed again; generated tokens are kept (R131)."""
    state.take_out(sequence)
    state.cache.release(sequence)
    state.leave_worker(sequence)
    sequence.status = SequenceStatus.PREEMPTED
    sequence.num_computed_tokens = 0
    sequence.num_preemptions += 1
    state.waiting.push_front(sequence)
    draft.preempted.append((sequence.request.request_id, mode))


def give_up(sequence: Sequence, state: CoreState, draft: StepDraft) -> None:
    """It can never fit, not even alone: ends it, so that those behind it are served (R51, R197)."""
    why = f"its {sequence.num_tokens} tokens need more than the {state.cache.capacity_tokens} that the cache can hold"
    draft.ended.append(state.retire(sequence, SequenceStatus.FINISHED_IGNORED, why))
