"""Running groups under v0: served in order, with victims from the tail when blocks run out."""

from collections import deque
from dataclasses import dataclass, field

from scheduler_svc.core.outputs import OutputRules
from scheduler_svc.core.parts.phases import Preemption
from scheduler_svc.core.parts.preemption import SWAP
from scheduler_svc.core.parts.progress_guard import STUCK
from scheduler_svc.core.plan_builder import PlanBuilder
from scheduler_svc.core.policies.vllm_v0.shares import ScheduledGroup, WholePrompts, spread
from scheduler_svc.core.request import Group, QueueKind, Sequence, SequenceStatus
from scheduler_svc.core.state import CoreState


@dataclass(slots=True)
class Decoded:
    """Result of the running phase. `left_over`: groups that sit out or exceed the budget; they stay in front."""

    scheduled: list[ScheduledGroup] = field(default_factory=list)
    left_over: list[Group] = field(default_factory=list)
    recomputed: list[Group] = field(default_factory=list)
    swapped_out: list[Group] = field(default_factory=list)

    @property
    def has_preempted(self) -> bool:
        """True if any group was preempted."""
        return bool(self.recomputed or self.swapped_out)

    def of(self, *, prefill: bool) -> list[ScheduledGroup]:
        """The scheduled prompts, or the scheduled decodes."""
        return [s for s in self.scheduled if s.is_prefill is prefill]


class Decodes:
    """Give each running group its KV slots; a group that gets none causes preemption of the last one, at worst of
    itself.

    As in vLLM, only the group that is short is subtracted from the budget, not its victims.
    """

    def __init__(self, shares: WholePrompts, preemption: Preemption, outputs: OutputRules) -> None:
        self._shares = shares
        self._preemption = preemption
        self._outputs = outputs

    def go_on(self, state: CoreState, builder: PlanBuilder) -> Decoded:
        """Process `state.running` in order; the caller then rebuilds that list."""
        done = Decoded()
        builder.num_lookahead_slots = self._shares.num_lookahead(in_prefill=False)
        queue = deque(state.running)
        while queue:
            if queue[0].is_paused:
                done.left_over.append(self._paused(queue.popleft(), builder))
                continue
            num_tokens = self._shares.num_new_tokens(queue[0], state, builder)
            if num_tokens == 0 and self._shares.is_chunked:
                break
            group = queue.popleft()
            if num_tokens == 0:
                done.left_over.append(group)
            elif self._outputs.set_aside(group, state):
                builder.late.append(group.request.request_id)
            elif self._make_room(group, num_tokens, queue, done, state, builder):
                done.scheduled.append(self._schedule(group, num_tokens, state, builder))
        done.left_over += [group for group in queue if group.place is QueueKind.RUNNING]
        builder.num_preempted += len(done.recomputed) + len(done.swapped_out)
        return done

    def _paused(self, group: Group, builder: PlanBuilder) -> Group:
        """Count a paused group's sequences in the budget, as `PrefillOrDecode` has done for all running groups already."""
        if self._shares.is_chunked:
            builder.budget.add_num_seqs(group.request.request_id, group.max_num_running_seqs)
        return group

    def _make_room(
        self, group: Group, num_tokens: int, queue: deque[Group], done: Decoded, state: CoreState, builder: PlanBuilder
    ) -> bool:
        lookahead = self._shares.num_lookahead(in_prefill=group.in_prefill)
        sequences, each = by_sequence(group, num_tokens)
        while not state.cache.can_extend(sequences, each, lookahead):
            if state.guard.may_stay(group, each, lookahead, alone=not queue, cache=state.cache):
                return True
            is_hopeless = state.guard.is_hopeless(group, alone=not (queue or done.scheduled))
            if is_hopeless and not state.is_largest:
                group.outgrew = state.cache.capacity_blocks
            elif is_hopeless:
                builder.ended += state.retire_group(group, SequenceStatus.FINISHED_IGNORED, STUCK)
                return False
            self._take_off(group, num_tokens, builder)
            candidates = state.guard.victims([*queue])
            victim = self._preemption.victim(candidates, group, state) if candidates else group
            if victim is not group:
                queue.remove(victim)
            builder.ended += self._outputs.drain(victim, state)
            if victim.is_finished:
                if victim is group:
                    return False
                continue
            builder.in_need = group
            mode = self._preemption.preempt(victim, state, builder)
            (done.swapped_out if mode == SWAP else done.recomputed).append(victim)
            if victim is group:
                return False
        return True

    def _schedule(self, group: Group, num_tokens: int, state: CoreState, builder: PlanBuilder) -> ScheduledGroup:
        request_id, is_prefill = group.request.request_id, group.in_prefill
        extend_all(group, num_tokens, self._shares, state, builder)
        builder.budget.add_num_tokens(request_id, num_tokens)
        if self._shares.is_chunked:
            builder.budget.add_num_seqs(request_id, group.max_num_running_seqs)
        elif is_prefill:
            builder.num_caught_up += num_tokens
        if group.request.lora_id > 0:
            builder.lora_ids[group.request.lora_id] = None
        return ScheduledGroup(group, num_tokens, is_prefill)

    @staticmethod
    def _take_off(group: Group, num_tokens: int, builder: PlanBuilder) -> None:
        builder.budget.subtract_num_tokens(group.request.request_id, num_tokens)
        builder.budget.subtract_num_seqs(group.request.request_id, group.max_num_running_seqs)
        builder.lora_ids.pop(group.request.lora_id, None)


def extend_all(group: Group, num_tokens: int, shares: WholePrompts, state: CoreState, builder: PlanBuilder) -> None:
    """Allocate slots for all scheduled sequences of a group."""
    lookahead = shares.num_lookahead(in_prefill=group.in_prefill)
    for sequence, num in spread(group, num_tokens):
        builder.extend(sequence, num, state, lookahead)


def by_sequence(group: Group, num_tokens: int) -> tuple[list[Sequence], int]:
    """The sequences of a group that take part in the step, and the most tokens that one of them takes."""
    shares = spread(group, num_tokens)
    return [sequence for sequence, _ in shares], max(num for _, num in shares)
