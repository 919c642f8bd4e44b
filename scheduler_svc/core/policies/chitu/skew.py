"""Chitu's skew scheduler: tasks are assigned to cache slots, and a step runs the tasks of one slot."""

from scheduler_svc.core.plan_builder import PlanBuilder
from scheduler_svc.core.policies.chitu.lanes import SkewSlots
from scheduler_svc.core.policies.chitu.reserved import Reservation, give_all, has_rows
from scheduler_svc.core.policies.chitu.scorers import TaskOrder
from scheduler_svc.core.policies.chitu.tasks import Room, TaskShares, hold_up
from scheduler_svc.core.reasons import Reason
from scheduler_svc.core.request import Group, QueueKind
from scheduler_svc.core.state import CoreState


class SkewBatch:
    """Plans the batch of the next slot in turn, after filling its free places with new tasks of one type.

    All slots share one pool. `strict_residents`: as in Chitu, tasks in slots with a type
    excluded by the strict mode do not run unless some ready task has an admitted type.
    """

    def __init__(
        self,
        order: TaskOrder,
        shares: TaskShares,
        slots: SkewSlots,
        chunk_size: int | None,
        *,
        strict_residents: bool,
    ) -> None:
        self._order = order
        self._shares = shares
        self._slots = slots
        self._chunk_size = chunk_size
        self._strict_residents = strict_residents

    def retune(self, order: TaskOrder, sizes: list[int], chunk_size: int | None) -> None:
        """Apply another order, sizes and chunks from the next batch on. The number of slots and their tasks stay."""
        assert len(sizes) == len(self._slots.sizes)
        self._order, self._slots.sizes, self._chunk_size = order, sizes, chunk_size

    def run(self, state: CoreState, builder: PlanBuilder) -> None:
        """Fill the slot and plan its batch."""
        tasks = self._shares.pool(state, builder)
        ready = [group for group in tasks if self._shares.is_ready(group)]
        if not any(self._counts(group) for group in ready):
            hold_up(state, Reason.LANE_BUSY)
            return
        builder.takes_lane = True
        self._fill(builder.lane, tasks, ready, state, builder)
        residents = [group for group in self._slots.residents(builder.lane) if not group.is_paused]
        batch, room = self._batch(residents, state, builder)
        give_all(batch, room, self._shares, state, builder)

    def _counts(self, group: Group) -> bool:
        return self._order.admits(group) or (group.lane is not None and not self._strict_residents)

    def _fill(self, lane: int, tasks: list[Group], ready: list[Group], state: CoreState, builder: PlanBuilder) -> None:
        """Add new tasks in score order: of the type of the slot's last task, or of the best new task if the slot
        is empty.
        """
        newcomers = [group for group in ready if group.lane is None and self._order.admits(group)]
        residents = self._slots.residents(lane)
        num_places = max(0, self._slots.sizes[lane] - len(residents))
        if not newcomers or num_places <= 0:
            hold_up(state, Reason.LANE_BUSY)
            return
        ranked = self._order.ranked(newcomers, builder.now, is_warming_up=state.is_warming_up)
        last = residents[-1] if residents else ranked[0]
        chosen = [group for group in ranked if group.in_prefill is last.in_prefill]
        entered = [group for group in tasks if group.lane is not None or group.place is QueueKind.RUNNING]
        reservation = Reservation(entered, state.cache.ledger.gpu.num_usable, state)
        for group in chosen[:num_places]:
            if group.place is QueueKind.WAITING and not (has_rows(group, entered, state) and reservation.take(group)):
                return
            self._slots.settle(group, lane)
            group.worker = state.number
            entered.append(group)
        hold_up(state, Reason.LANE_BUSY if chosen else Reason.SLOT_TYPE)

    def _batch(self, residents: list[Group], state: CoreState, builder: PlanBuilder) -> tuple[list[Group], Room]:
        """All tasks of the slot; with chunks, only the prefills if the last one is a prefill.

        A prefill that took the place of a finished decode runs beside the decodes, uncut as far as the step
        allows.
        """
        num_blocks = state.cache.num_free_gpu
        if self._chunk_size is None or not (residents and residents[-1].in_prefill):
            room = Room.of_chunks(None, num_blocks, builder)
            room.is_whole = self._chunk_size is None
            return residents, room
        prefills = [group for group in residents if group.in_prefill]
        return prefills, Room.of_chunks(self._chunk_size, num_blocks, builder)
