"""Recompute lost work: after a failed step, after the loss of a worker, or when prefixes must be dropped.

`loop/lane_keeper` notices lost workers. Preemption to free blocks for others is in `parts/preemption.py`.
"""

from scheduler_svc.core.plan import EndedSequence
from scheduler_svc.core.plans_in_flight import PlansInFlight
from scheduler_svc.core.reasons import Reason
from scheduler_svc.core.request import Group, QueueKind, SequenceStatus
from scheduler_svc.core.state import CoreState


def fail(step: int, why: str, state: CoreState, flights: PlansInFlight) -> list[EndedSequence]:
    """Handle a plan that the worker could not run: end its sequences with the error `why` (beams: the whole
    group).

    Sequences in later plans that may have built on the KV it was to compute are recomputed.
    """
    reduced, shares = flights.is_reduced(step), flights.land_as_objects(step)
    alive = [flight for flight in shares if not flight.sequence.status.is_finished]
    later = flights.groups_built_on(alive)
    for flight in alive:
        state.cache.retract(flight.sequence, flight.computed_before)
    if later or reduced or len(alive) < len(shares) or any(flight.has_left for flight in alive):
        state.cache.reset_prefixes()
    ended = [state.retire(f.sequence, SequenceStatus.FINISHED_ABORTED, why) for f in alive]
    for flight in alive:
        if flight.sequence.request.beam is not None:
            ended += state.retire_group(flight.sequence.group, SequenceStatus.FINISHED_ABORTED, why)
    send_back(later, state, flights)
    return ended


def send_back(groups: list[Group], state: CoreState, flights: PlansInFlight) -> None:
    """Requeue groups at the front of the waiting queue, in their order; their results in flight are ignored."""
    sequences = [sequence for group in groups for sequence in group.live]
    for group in reversed(groups):
        state.take_out(group)
        restart(group, state)
    for sequence in sequences:
        sequence.num_preemptions += 1
        state.leave_worker(sequence)
    flights.discard(sequences)


def lose_memory(state: CoreState, flights: PlansInFlight) -> None:
    """Requeue what ran on a worker group in order; drop plans in flight, worker state and cached prefixes.

    Groups that were preempted there wait for no result of it any more.
    """
    flights.clear()
    for group in reversed([*state.running, *state.swapped]):
        restart(group, state)
    state.running.clear()
    state.swapped.clear()
    for request in state.requests.values():
        for group in request.groups:
            if group.worker == state.number:
                for sequence in group.live:
                    sequence.num_placeholders = 0
    state.left.clear()
    state.held.clear()
    state.joined.clear()
    state.arrived.clear()
    state.on_worker.clear()
    state.cache.reset_prefixes()


def lose_lane(lane: int, state: CoreState, flights: PlansInFlight) -> None:
    """Requeue the groups of a lost lane as if they had never been placed on one.

    Cache state is dropped before `group.lane` is cleared, because the caches find it by lane.
    """
    flights.clear_lane(lane)
    lost = [group for request in state.requests.values() for group in request.groups if group.lane == lane]
    for group in reversed([g for g in (*state.running, *state.swapped) if g.lane == lane]):
        state.take_out(group)
        restart(group, state)
    for group in lost:
        for sequence in group.live:
            state.cache.forget(sequence)
            state.on_worker.pop(sequence.name, None)
        group.lane = None
    state.left = {name: at for name, at in state.left.items() if at != lane}
    state.cache.ledger.parts()[lane].gpu.reset_prefixes()


def outgrow(group: Group, state: CoreState) -> None:
    """Requeue a group that this worker group's cache is too small for, to continue on a larger one.

    None of its results may be in flight.
    """
    group.outgrew = state.cache.capacity_blocks
    state.take_out(group)
    restart(group, state)
    for sequence in group.live:
        sequence.num_preemptions += 1
        state.leave_worker(sequence)


def restart(group: Group, state: CoreState) -> None:
    """Requeue a group at the head of the waiting queue, without blocks and with its tokens.

    The caller has removed it from its queue.
    """
    for sequence in group.live:
        state.cache.release(sequence)
        sequence.status = SequenceStatus.PREEMPTED
        sequence.num_placeholders = 0
        sequence.draft_token_ids = []
        sequence.restart()
    group.is_paused = False  # a move, or what its masks owe, ends with its work here
    group.place = QueueKind.WAITING
    state.waiting.push_front(group)
    state.journal.leaves(group, QueueKind.WAITING, Reason.WORKER_LOST)
