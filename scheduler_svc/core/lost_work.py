"""What has to be computed again: after a step that failed, a worker that was lost, or for prefixes that are to be forgotten.

Preemption, which makes room for others, is `preemption`'s; here nobody gains anything.
"""

from scheduler_svc.core.flights import Flights
from scheduler_svc.core.plan import EndedSequence
from scheduler_svc.core.reasons import Reason
from scheduler_svc.core.request import Group, Place, SequenceStatus
from scheduler_svc.core.state import CoreState


def fail(step: int, why: str, state: CoreState, flights: Flights) -> list[EndedSequence]:
    """The worker could not run that plan: its sequences end with `why`, of beams all. Who was planned behind it, and may have
    built on what it was to compute, is computed again."""
    shares = flights.land_as_objects(step)
    alive = [flight for flight in shares if not flight.sequence.status.is_finished]
    later = flights.groups_built_on(alive)
    for flight in alive:
        state.cache.retract(flight.sequence, flight.computed_before)
    if later or len(alive) < len(shares) or any(flight.has_left for flight in alive):
        state.cache.reset_prefixes()
    ended = [state.retire(f.sequence, SequenceStatus.FINISHED_ABORTED, why) for f in alive]
    for flight in alive:
        if flight.sequence.request.beam is not None:
            ended += state.retire_group(flight.sequence.group, SequenceStatus.FINISHED_ABORTED, why)
    send_back(later, state, flights)
    return ended


def send_back(groups: list[Group], state: CoreState, flights: Flights) -> None:
    """They wait again before all others, in their order; what is under way of them is ignored."""
    sequences = [sequence for group in groups for sequence in group.live]
    for group in reversed(groups):
        state.take_out(group)
        restart(group, state)
    for sequence in sequences:
        sequence.num_preemptions += 1
        state.leave_worker(sequence)
    flights.discard(sequences)


def lose_memory(state: CoreState, flights: Flights) -> None:
    """All that ran waits again, in its order; nothing is under way, no worker holds anything, no prefix is known."""
    flights.clear()
    for group in reversed([*state.running, *state.swapped]):
        restart(group, state)
    state.running.clear()
    state.swapped.clear()
    for request in state.requests.values():
        for sequence in request.unfinished:
            sequence.num_placeholders = 0
    state.left.clear()
    state.on_worker.clear()
    state.cache.reset_prefixes()


def lose_lane(lane: int, state: CoreState, flights: Flights) -> None:
    """As if what was its had never had a lane. Its caches forget it before it has none: they are asked by lane."""
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


def restart(group: Group, state: CoreState) -> None:
    """It waits as the first of all, without blocks and with its tokens. Whoever had it in a queue has taken it out."""
    for sequence in group.live:
        state.cache.release(sequence)
        sequence.status = SequenceStatus.PREEMPTED
        sequence.num_placeholders = 0
        sequence.draft_token_ids = []
        sequence.restart()
    group.place = Place.WAITING
    state.waiting.push_front(group)
    state.journal.leaves(group, Place.WAITING, Reason.WORKER_LOST)
