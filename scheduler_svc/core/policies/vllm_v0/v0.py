"""The two ways in which v0 composes a step of prompts, decodes and swapped groups."""

from scheduler_svc.core.plan_builder import PlanBuilder
from scheduler_svc.core.policies.vllm_v0.decode import Decoded, Decodes
from scheduler_svc.core.policies.vllm_v0.prefill import Prefills
from scheduler_svc.core.policies.vllm_v0.priority_preemption import PriorityPreemption
from scheduler_svc.core.policies.vllm_v0.shares import ScheduledGroup
from scheduler_svc.core.policies.vllm_v0.swapped import SwapIns
from scheduler_svc.core.reasons import Reason
from scheduler_svc.core.request import QueueKind
from scheduler_svc.core.state import CoreState


class PrefillOrDecode:
    """A step is all prompts or all decodes; swapped groups resume before new prompts start.

    Except in the step after one that swapped out lower-priority groups: there the head starts first, or its
    victims would be swapped in again before it.
    """

    MEMORY = ("_has_made_room",)

    def __init__(
        self, prefills: Prefills, decodes: Decodes, swap_ins: SwapIns, make_room: PriorityPreemption | None
    ) -> None:
        self._prefills = prefills
        self._decodes = decodes
        self._swap_ins = swap_ins
        self._make_room = make_room
        self._has_made_room = False

    def run(self, state: CoreState, builder: PlanBuilder) -> None:
        """Plan a step of prompts, or else of decodes."""
        for group in state.running:
            builder.budget.add_num_seqs(group.request.request_id, group.max_num_running_seqs)
            if group.request.lora_id > 0:
                builder.lora_ids[group.request.lora_id] = None
        prompts = self._prompts(state, builder)
        self._has_made_room = False
        if prompts:
            hold_up_swapped(Reason.PREFILL_FIRST, state)
            state.running += [p.group for p in prompts]
            put_all(builder, prompts)
        else:
            self._decode(state, builder)

    def _prompts(self, state: CoreState, builder: PlanBuilder) -> list[ScheduledGroup]:
        if self._has_made_room or not state.swapped:
            return self._prefills.start(state, builder)
        if len(state.waiting):
            state.journal.stop(state.waiting.peek(), Reason.SWAPPED_FIRST, swapped=len(state.swapped))
        return []

    def _decode(self, state: CoreState, builder: PlanBuilder) -> None:
        if self._make_room is not None:
            self._make_room.make_room(state, builder)
            self._has_made_room = bool(builder.swap_out.pairs)
        done = self._decodes.go_on(state, builder)
        back = bring_back(self._swap_ins, done, state, builder)
        state.running[:] = [*done.left_over, *(s.group for s in done.scheduled), *(s.group for s in back)]
        queue_victims(done, state)
        put_all(builder, [*done.scheduled, *back])


class DecodeThenPrefill:
    """Running decodes and chunked prompts first, then swapped groups, then new prompts, under one budget."""

    def __init__(self, prefills: Prefills, decodes: Decodes, swap_ins: SwapIns) -> None:
        self._prefills = prefills
        self._decodes = decodes
        self._swap_ins = swap_ins

    def run(self, state: CoreState, builder: PlanBuilder) -> None:
        """Plan a step. The orders of queue and batch are those of vLLM 0.6.3."""
        done = self._decodes.go_on(state, builder)
        back = bring_back(self._swap_ins, done, state, builder)
        # Scheduled groups rejoin `running` at the end, so that `delay_factor` does not delay prompts because
        # of them.
        state.running[:] = done.left_over
        prompts = self._prefills.start(state, builder)
        decodes, chunks = done.of(prefill=False), done.of(prefill=True)
        back_decodes = [s for s in back if not s.is_prefill]
        back_chunks = [s for s in back if s.is_prefill]
        in_order = [*back_decodes, *back_chunks, *decodes, *chunks, *prompts]
        state.running += [s.group for s in in_order]
        queue_victims(done, state)
        put_all(builder, [*prompts, *chunks, *back_chunks, *decodes, *back_decodes])


def bring_back(swap_ins: SwapIns, done: Decoded, state: CoreState, builder: PlanBuilder) -> list[ScheduledGroup]:
    """Swap groups in, unless this step preempted any."""
    if not (done.has_preempted or builder.swap_out.pairs):
        return swap_ins.bring_in(state, builder)
    hold_up_swapped(Reason.STEP_PREEMPTS, state, preempted=len(builder.preempted))
    return []


def hold_up_swapped(reason: Reason, state: CoreState, **numbers: int) -> None:
    """Record why no group is swapped in during this step."""
    if state.swapped:
        state.journal.stop_all(QueueKind.SWAPPED, reason, **numbers)


def queue_victims(done: Decoded, state: CoreState) -> None:
    """Queue victims: at the front of waiting, the last one first, or at the tail of swapped."""
    for group in done.recomputed:
        group.place = QueueKind.WAITING
        state.waiting.push_front(group)
    for group in done.swapped_out:
        group.place = QueueKind.SWAPPED
        state.swapped.append(group)


def put_all(builder: PlanBuilder, scheduled: list[ScheduledGroup]) -> None:
    """Add the batch to the plan, sorted by adapter if there are any."""
    if any(s.group.request.lora_id for s in scheduled):
        scheduled = sorted(scheduled, key=lambda s: (s.group.request.lora_id, s.group.request.request_id))
    builder.num_prefill_groups = sum(s.is_prefill for s in scheduled)
    for share in scheduled:
        share.put(builder)
