"""Move a running group to another worker group with its KV (live migration), in two phases.

1. While the group goes on, the service copies its full blocks, which do not change any more, to the host memory of the
   other worker. Then the group is *held*: it sits out the plans until none of its results is outstanding, and the rest is copied.
2. `hand_over` frees its blocks here and allocates others there, in one call: no block belongs to it twice or to none. The
   other worker group's next plan says into which blocks the copy, its *image*, is placed, before that step's model runs.

Until `hand_over` the group can be preempted, end, or go on where it is; the image is then dropped. Groups of one sequence that
decodes move. As in Llumnix (arXiv 2406.03243), but for one last copy of what the group computed meanwhile, not several.
"""

from dataclasses import dataclass

from block_manager.cache_rules import AllocStatus, Pair, PrefixHit
from scheduler_svc.core.parts.placement import can_hold
from scheduler_svc.core.request import Group, QueueKind, Sequence
from scheduler_svc.core.state import CoreState
from scheduler_svc.core.worker_group import WorkerGroup


@dataclass(frozen=True, slots=True)
class Residence:
    """A group on the worker group where it runs.

    `blocks`: device blocks, in logical order, of the tokens whose KV is computed for sure; the first `num_full` do not change any
    more. `ticket`: changes when it is preempted. `is_quiet`: no result is outstanding.
    """

    worker: int
    ticket: int
    blocks: tuple[int, ...]
    num_full: int
    is_quiet: bool


def movable(worker: WorkerGroup) -> list[str]:
    """Names of the sequences on a worker group that could be moved, in running order."""
    return [group.sequences[0].name for group in worker.state.running if _can_move(group, worker)]


def residence(sequence: Sequence, worker: WorkerGroup) -> Residence | None:
    """Where a sequence runs; None if it cannot be moved any more."""
    group, state = sequence.group, worker.state
    if not _can_move(group, worker):
        return None
    state.fast_rows.sync(group)
    sure, size = sequence.num_tokens - 1, state.limits.block_size
    blocks = state.cache.ledger.tables[sequence.name][: -(-sure // size)]
    is_settled = sequence.num_computed_tokens == sure and not sequence.num_placeholders
    is_quiet = is_settled and not worker.flights.has(sequence.name)
    return Residence(state.number, group.ticket, tuple(blocks), sure // size, is_quiet)


def hold(group: Group, state: CoreState) -> None:
    """Have a running group sit out plans from the next one on; no-op if it is held."""
    if group not in state.held:
        state.held.append(group)


def let_go(group: Group, state: CoreState) -> None:
    """Have a held group take part in plans again; no-op for others."""
    if group in state.held:
        state.held.remove(group)
        group.is_paused = False


def has_room(sequence: Sequence, target: WorkerGroup) -> bool:
    """True if the other worker group takes the sequence now."""
    state = target.state
    seats = state.num_running_seqs + 1 <= state.limits.max_num_seqs
    return state.takes_work and seats and can_hold(state, sequence.group) and _hit(sequence, state) is not None


def hand_over(sequence: Sequence, image: str, source: WorkerGroup, target: WorkerGroup) -> bool:
    """Continue a held, quiet sequence on another worker group; False, and nothing has changed, if that is not possible now.

    `image`: the copy of its blocks (`Residence.blocks`) at that worker.
    """
    group = sequence.group
    source.end_pending(group)
    found = residence(sequence, source)
    if found is None or not (found.is_quiet and group in source.state.held and has_room(sequence, target)):
        return False
    hit = _hit(sequence, target.state)
    assert hit is not None
    source.state.held.remove(group)
    source.drop(group)
    _start(sequence, hit, source.state.number, target.state)
    target.state.arrived[image] = _missing(sequence, hit, len(found.blocks), target.state)
    return True


def may_move(group: Group, worker: WorkerGroup) -> bool:
    """True for one running sequence, in its prompt too. Several that share blocks would have to move together."""
    is_single = len(group.sequences) == 1 and not group.needs_result and group.num_children == 1
    is_here = group.place is QueueKind.RUNNING and group.worker == worker.state.number
    return is_single and is_here and not worker.lanes.keeps_groups


def _can_move(group: Group, worker: WorkerGroup) -> bool:
    return (
        may_move(group, worker)
        and group.sequences[0].name in worker.state.on_worker  # whose image is placed, if it came from another one
        and group.sequences[0].num_output_tokens > 0
        and not group.in_prefill
        and not worker.state.guard.is_stuck(group)
    )


def _hit(sequence: Sequence, state: CoreState) -> PrefixHit | None:
    """The blocks that it finds there; None if there are none for the rest."""
    hit = state.cache.lookup(sequence)
    status = state.cache.can_admit([sequence], hit, sequence.num_tokens - 1 - hit.num_tokens)
    return hit if status is AllocStatus.OK else None


def _start(sequence: Sequence, hit: PrefixHit, came_from: int, state: CoreState) -> None:
    group, sure = sequence.group, sequence.num_tokens - 1
    state.cache.admit([sequence], hit, sure - hit.num_tokens)
    state.cache.retract(
        sequence, sure
    )  # the KV of the last token is computed by the next step of the sequence, not before
    state.queued_tokens = None
    state.running.append(group)
    state.start(group, state.journal.now, came_from)
    state.joined.append(group)
    group.is_paused = True


def _missing(sequence: Sequence, hit: PrefixHit, num_blocks: int, state: CoreState) -> list[Pair]:
    """(index in the image, block) of the blocks that it shares with no other sequence: those of others hold the same already."""
    table, refs = state.cache.ledger.tables[sequence.name], state.cache.ledger.gpu.refs
    return [(i, table[i]) for i in range(len(hit.block_ids), num_blocks) if refs[table[i]] == 1]
