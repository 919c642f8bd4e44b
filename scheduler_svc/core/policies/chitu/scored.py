"""Chitu's scheduler: a batch is all prefills or all decodes, by the type of the task with the best score.

Prompts may fill as many blocks as an adaptive threshold allows; decodes that run out of blocks preempt the last
in score order.
"""

from dataclasses import dataclass
from typing import Any

from scheduler_svc.core.errors import TaskDoesNotFit
from scheduler_svc.core.parts.preemption import Recompute
from scheduler_svc.core.plan_builder import PlanBuilder
from scheduler_svc.core.policies.chitu.scorers import TaskOrder
from scheduler_svc.core.policies.chitu.tasks import Given, Room, TaskShares, give_up, hold_up
from scheduler_svc.core.policies.chitu.threshold import AdaptiveThreshold
from scheduler_svc.core.policies.mixed.mixed import leave
from scheduler_svc.core.reasons import Reason
from scheduler_svc.core.request import Group, QueueKind
from scheduler_svc.core.state import CoreState

TOO_LARGE = "its tokens need more blocks than the cache has"


@dataclass(frozen=True, slots=True)
class BatchLimits:
    """Maximum tasks of a batch by type; `chunk_size`: prompt tokens of a batch, None = prompts are not chunked."""

    prefill_num_tasks: int
    decode_num_tasks: int
    chunk_size: int | None


class ScoredBatch:
    """Plans the batch of one scheduler group.

    `fails`: tasks that do not fit fail the step, as in Chitu. Otherwise they wait for blocks held by steps in
    flight, cause preemption of half-computed prompts, or end alone.
    """

    def __init__(
        self,
        order: TaskOrder,
        shares: TaskShares,
        limits: BatchLimits,
        threshold: AdaptiveThreshold,
        preemption: Recompute,
        *,
        fails: bool,
    ) -> None:
        self._order = order
        self._shares = shares
        self._limits = limits
        self._threshold = threshold
        self._preemption = preemption
        self._fails = fails
        self._evicted: list[tuple[str, int]] = []
        self._is_fallback = False

    def retune(self, order: TaskOrder, limits: BatchLimits) -> None:
        """Apply another order and other sizes from the next batch on."""
        self._order, self._limits = order, limits

    def run(self, state: CoreState, builder: PlanBuilder) -> None:
        """Plan prefills, or else decodes."""
        self._evicted, self._is_fallback = [], False
        ready = [
            group
            for group in self._shares.pool(state, builder)
            if self._shares.is_ready(group) and self._order.admits(group)
        ]
        if not ready:
            hold_up(state, Reason.LANE_BUSY)
            return
        builder.takes_lane = True
        ranked = self._order.ranked(ready, builder.now, is_warming_up=state.is_warming_up)
        prefills = [group for group in ranked if group.in_prefill]
        decodes = [group for group in ranked if not group.in_prefill]
        if ranked[0].in_prefill:
            self._is_fallback = not self._prefill(prefills, state, builder)
            if self._is_fallback:
                self._check_fits(prefills[0], state)
        else:
            hold_up(state, Reason.DECODE_FIRST)
        if not builder.entries:
            self._decode(decodes, state, builder)
        if not (builder.entries or self._fails):
            self._unblock(prefills, state, builder)
        for entry in builder.entries.values():
            entry.sequence.group.lane = builder.lane

    def view(self) -> dict[str, Any]:
        """`threshold`; of the last plan `evicted`: (request id, threshold after it), and `fallback`: no prefill
        fitted.
        """
        return {"threshold": self._threshold.value, "evicted": list(self._evicted), "fallback": self._is_fallback}

    # --- prefill -----------------------------------------------------------------------------------------------------

    def _prefill(self, prefills: list[Group], state: CoreState, builder: PlanBuilder) -> bool:
        """Schedule prefills in score order while there is room; returns whether any was. None is skipped for lack
        of blocks.
        """
        room = self._room(state, builder)
        num_taken, num_seqs = 0, state.num_running_seqs
        for group in prefills:
            if num_taken == self._limits.prefill_num_tasks or room.num_tokens <= 0:
                self._tell_full(num_taken, room, state)
                break
            is_new = group.place is QueueKind.WAITING
            if is_new and num_seqs + group.max_num_running_seqs > state.limits.max_num_seqs:
                state.journal.skip(group, Reason.MAX_SEQS, running=num_seqs, limit=state.limits.max_num_seqs)
                continue
            given = self._shares.give(group, room, state, builder)
            if given is not Given.SHARE:
                if not is_new:  # a waiting task's reason is recorded already
                    reason = room.short_of if given is Given.NO_BLOCKS else Reason.TOKEN_BUDGET
                    hold_up(state, reason, **room.lack)
                break
            num_taken += 1
            num_seqs += is_new * group.max_num_running_seqs
        return num_taken > 0

    def _room(self, state: CoreState, builder: PlanBuilder) -> Room:
        used = self._threshold.total - state.cache.num_free_gpu
        short_of = Reason.NEED_BLOCKS if self._threshold.value == self._threshold.total else Reason.THRESHOLD
        return Room.of_chunks(self._limits.chunk_size, self._threshold.value - used, builder, short_of)

    def _tell_full(self, num_taken: int, room: Room, state: CoreState) -> None:
        if num_taken == self._limits.prefill_num_tasks:
            hold_up(state, Reason.MAX_SEQS, running=num_taken, limit=num_taken)
        else:
            room.lacks_tokens(1, self._limits.chunk_size or state.limits.max_num_batched_tokens)
            hold_up(state, Reason.TOKEN_BUDGET, **room.lack)

    def _check_fits(self, best: Group, state: CoreState) -> None:
        """Fail the step if the best task could not start with all blocks free: it, or its first chunk, is too large."""
        total = self._threshold.total
        if self._fails and self._threshold.value == state.cache.num_free_gpu == total:
            num_tokens = best.live[0].num_tokens
            raise TaskDoesNotFit("prefill_does_not_fit", best.request.request_id, num_tokens, self._evicted)

    def _unblock(self, prefills: list[Group], state: CoreState, builder: PlanBuilder) -> None:
        """Resolve a deadlock of half-computed prompts, or of the threshold, when nothing else runs: preempt the
        last ones.
        """
        if any(not (group.in_prefill and self._shares.is_ready(group)) for group in state.running):
            return
        self._threshold.recover()
        started = [group for group in prefills if group.place is QueueKind.RUNNING]
        new = [group for group in prefills if group.place is QueueKind.WAITING]
        while not self._prefill([*started, *new], state, builder):
            if len(started) > 1:
                self._evict(started.pop(), state, builder)
                self._threshold.recover()
            elif in_line := [*started, *new]:
                give_up(in_line[0], TOO_LARGE, state, builder)
                started, new = [], [group for group in new if group is not in_line[0]]
            else:
                return

    # --- decode ------------------------------------------------------------------------------------------------------

    def _decode(self, decodes: list[Group], state: CoreState, builder: PlanBuilder) -> None:
        """Schedule decodes. Blocks must suffice for all that are ready, even if the batch takes fewer."""
        while decodes and self._shares.num_blocks_to_decode(decodes) > state.cache.num_free_gpu:
            if len(decodes) > 1:
                builder.in_need = decodes[0]
                self._evict(decodes.pop(), state, builder)
            elif not self._make_room(decodes[0], state, builder):
                return
        room = Room.of_chunks(None, state.cache.num_free_gpu, builder)
        for group in decodes[: self._limits.decode_num_tasks]:
            self._shares.give(group, room, state, builder)

    def _make_room(self, alone: Group, state: CoreState, builder: PlanBuilder) -> bool:
        """Preempt the last half-computed prompt for the only ready decode. False if the decode must wait or was ended."""
        if self._fails:
            num_tokens = alone.live[0].num_tokens
            raise TaskDoesNotFit("decode_cannot_finish", alone.request.request_id, num_tokens, self._evicted)
        others = [group for group in state.running if group is not alone]
        if any(not self._shares.is_ready(group) for group in others):
            return False
        if not others:
            give_up(alone, TOO_LARGE, state, builder)
            return False
        builder.in_need = alone
        self._evict(self._order.ranked(others, builder.now)[-1], state, builder)
        return True

    def _evict(self, group: Group, state: CoreState, builder: PlanBuilder) -> None:
        """Preempt a task by recompute and release it from its scheduler group; each preemption lowers the threshold."""
        leave(group, self._preemption, state, builder)
        group.lane = None
        self._evicted.append((group.request.request_id, self._threshold.lower()))
