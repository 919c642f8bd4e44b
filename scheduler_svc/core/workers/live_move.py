"""Move a running group to another worker group with its KV (live migration), in two phases.

1. While the group goes on, the service copies its full blocks, which do not change any more, to the host memory of the
   other worker. Then the group is *held*: it sits out the plans until none of its results is outstanding, and the rest is copied.
2. `hand_over` frees its blocks here and allocates others there, in one call: no block belongs to it twice or to none. The
   other worker group's next plan says into which blocks the copy, its *image*, is placed, before that step's model runs.

Until `hand_over` the group can be preempted, end, or go on where it is; the image is then dropped. Groups of one sequence that
decodes move. As in Llumnix (arXiv 2406.03243), but for one last copy of what the group computed meanwhile, not several.
"""

from collections.abc import Sequence as Seq
from dataclasses import dataclass

from block_manager.cache_rules import AllocStatus, Pair, PrefixHit
from block_manager.ledger import HOLE
from scheduler_svc.core.parts.placement import can_hold
from scheduler_svc.core.request import Group, QueueKind, Sequence
from scheduler_svc.core.state import CoreState
from scheduler_svc.core.workers.worker_group import WorkerGroup

_SPARE = 4
"""Free blocks for each running group where one moves to, so that it does not come back soon."""


@dataclass(frozen=True, slots=True)
class Residence:
    """A group on the worker group where it runs.

    `blocks`: device blocks with all that is computed for sure, in the order of `Ledger.blocks_of_copy`; the first `num_full`
    do not change any more. `ticket`: changes when it is preempted. `is_quiet`: no result is outstanding.
    """

    worker: int
    ticket: int
    blocks: tuple[int, ...]
    num_full: int
    is_quiet: bool


Workers = Seq[WorkerGroup]
"""All worker groups, by number."""


# --- what can move, and where ------------------------------------------------------------------------------------------


def movable(worker: WorkerGroup) -> list[str]:
    """Names of the sequences on a worker group that could be moved, in running order."""
    return [group.sequences[0].name for group in worker.state.running if _can_move(group, worker)]


def residence(name: str, workers: Workers) -> Residence | None:
    """Where a sequence runs; None if it cannot be moved any more."""
    sequence = workers[0].state.shared.find(name)
    return None if sequence is None else _residence(sequence, workers[sequence.group.worker])


def has_room(name: str, workers: Workers, target: int) -> bool:
    """True if another worker group takes a movable sequence now."""
    sequence = workers[0].state.shared.find(name)
    return sequence is not None and _has_room(sequence, workers[target])


def is_short(worker: WorkerGroup) -> bool:
    """True if the running groups may soon need more blocks than are free, so that one would be preempted."""
    return 1 < len(worker.state.running) > worker.state.cache.num_free_gpu


def has_spare_room(name: str, workers: Workers, target: int) -> bool:
    """True if another worker group takes a movable sequence now and is far from short of blocks then."""
    sequence, state = workers[0].state.shared.find(name), workers[target].state
    if sequence is None:
        return False
    left = state.cache.num_free_gpu - state.cache.ledger.blocks_for(sequence.num_tokens)
    return left >= _SPARE * (len(state.running) + 1) and _has_room(sequence, workers[target])


def may_move(group: Group, worker: WorkerGroup) -> bool:
    """True for one running sequence, in its prompt too. Several that share blocks would have to move together."""
    is_single = len(group.sequences) == 1 and not (group.needs_result or group.starts_over) and group.num_children == 1
    is_here = group.place is QueueKind.RUNNING and group.worker == worker.state.number
    return is_single and is_here and worker.moves_groups


# --- the phases ----------------------------------------------------------------------------------------------------------


def hold(name: str, workers: Workers) -> None:
    """Have a running sequence sit out plans from the next one on; no-op if it is held, or not running."""
    sequence = workers[0].state.shared.find(name)
    if sequence is None or sequence.group.place is not QueueKind.RUNNING:
        return
    held = workers[sequence.group.worker].state.held
    if sequence.group not in held:
        held.append(sequence.group)


def let_go(name: str, workers: Workers) -> None:
    """Have a held sequence take part in plans again; no-op for others."""
    sequence = workers[0].state.shared.find(name)
    if sequence is not None and sequence.group in (held := workers[sequence.group.worker].state.held):
        held.remove(sequence.group)
        sequence.group.is_paused = False


def hand_over(name: str, workers: Workers, target: WorkerGroup, image: str) -> bool:
    """Continue a held, quiet sequence on another worker group; False, and nothing has changed, if that is not possible now.

    `image`: the copy of its blocks (`Residence.blocks`) at that worker.
    """
    sequence = workers[0].state.shared.find(name)
    if sequence is None:
        return False
    group, source = sequence.group, workers[sequence.group.worker]
    source.end_pending(group)
    found = _residence(sequence, source)
    if found is None or not (found.is_quiet and group in source.state.held and _has_room(sequence, target)):
        return False
    hit = _hit(sequence, target.state)
    assert hit is not None
    source.state.held.remove(group)
    source.drop(group)
    _start(sequence, hit, source.state.number, target.state)
    target.state.arrived[image] = _missing(sequence, hit, target.state)
    return True


# --- inside --------------------------------------------------------------------------------------------------------------


def _can_move(group: Group, worker: WorkerGroup) -> bool:
    return (
        may_move(group, worker)
        and group.sequences[0].name in worker.state.on_worker  # so its image is placed, if it came from another one
        and group.sequences[0].num_output_tokens > 0
        and not group.in_prefill
        and not worker.state.guard.is_stuck(group)
    )


def _residence(sequence: Sequence, worker: WorkerGroup) -> Residence | None:
    group, state = sequence.group, worker.state
    if not _can_move(group, worker):
        return None
    state.fast_rows.sync(group)
    sure = sequence.num_tokens - 1
    blocks, num_full = state.cache.ledger.blocks_of_copy(sequence.name, sure)
    is_settled = sequence.num_computed_tokens == sure and not sequence.num_placeholders
    is_quiet = is_settled and not worker.flights.has(sequence.name)
    return Residence(state.number, group.ticket, tuple(blocks), num_full, is_quiet)


def _has_room(sequence: Sequence, target: WorkerGroup) -> bool:
    state = target.state
    seats = state.num_running_seqs + 1 <= state.limits.max_num_seqs
    return state.takes_work and seats and can_hold(state, sequence.group) and _hit(sequence, state) is not None


def _hit(sequence: Sequence, state: CoreState) -> PrefixHit | None:
    """The blocks that it finds there; None if there are none for the rest.

    None are looked for where it has states: a prefix would end at a checkpoint, and these are further.
    """
    hit = PrefixHit() if state.cache.ledger.num_state_blocks else state.cache.lookup(sequence)
    status = state.cache.can_admit([sequence], hit, sequence.num_tokens - 1 - hit.num_tokens)
    return hit if status is AllocStatus.OK else None


def _start(sequence: Sequence, hit: PrefixHit, came_from: int, state: CoreState) -> None:
    group, sure = sequence.group, sequence.num_tokens - 1
    state.cache.admit([sequence], hit, sure - hit.num_tokens)
    # The KV of the last token is computed by the next step of the sequence, not before.
    state.cache.retract(sequence, sure)
    _free_behind_windows(sequence, hit, state)
    state.queued_tokens = None
    state.running.append(group)
    state.start(group, state.journal.now, came_from)
    state.joined.append(group)
    group.is_paused = True


def _free_behind_windows(sequence: Sequence, hit: PrefixHit, state: CoreState) -> None:
    """Free the blocks that no token to come attends to. The image has nothing for them, so they must not stay cached."""
    pool = state.cache.device_pool
    for block in pool.take_out_of_window(sequence, sequence.num_tokens - 1) if pool is not None else ():
        if block not in hit.block_ids:
            state.cache.ledger.gpu.unregister(block)
        state.cache.ledger.gpu.release([block])


def _missing(sequence: Sequence, hit: PrefixHit, state: CoreState) -> list[Pair]:
    """(index in the image, block) of the blocks that it shares with no other sequence: those of others hold the same already."""
    blocks, _ = state.cache.ledger.blocks_of_copy(sequence.name, sequence.num_tokens - 1)
    places = enumerate(blocks[len(hit.block_ids) :], len(hit.block_ids))
    return [(i, block) for i, block in places if block != HOLE and state.cache.ledger.gpu.refs[block] == 1]
