"""Live moves: running groups continue on another worker, which fetches their KV from the one where they run.

They leave a worker that is drained, and one that is short of blocks while another has many. `core/workers/live_move` has the
phases; here are the choice of group and worker, and the calls to workers, for which nothing waits. A group that cannot move
goes on where it is.
"""

import asyncio
import itertools
import logging
from dataclasses import dataclass, field

from protos.worker.v1 import worker_pb2
from scheduler_svc.core.workers import live_move
from scheduler_svc.core.workers.live_move import Residence
from scheduler_svc.observe.recording.recorder import AnyCore
from scheduler_svc.workers.lane import WorkerLane
from svc_common.clock import NS_PER_S, monotonic_ns
from svc_common.errors import QuireError

log = logging.getLogger(__name__)

_MOST_AT_ONCE = 4
"""Moves from one worker at a time."""

Fetching = asyncio.Task[worker_pb2.FetchBlocksResponse]


@dataclass(slots=True)
class LiveMove:
    """A move under way: first the full blocks are fetched, then, while it is held, the rest.

    `epochs`: of both workers when it began. `held_ns`: since when the group sits out steps, 0 = it does not.
    """

    name: str
    image: str
    source: WorkerLane
    target: WorkerLane
    ticket: int
    epochs: tuple[int, int]
    num_sent: int
    fetching: Fetching
    is_last: bool = False
    held_ns: int = 0
    num_bytes: int = 0
    began_ns: int = field(default_factory=monotonic_ns)

    @property
    def is_of_both(self) -> bool:
        """True while both workers are connected in the epochs in which it began."""
        both = self.source.is_here and self.target.is_here
        return (
            both
            and not self.target.is_draining
            and (self.source.planner.epoch, self.target.planner.epoch) == self.epochs
        )


class LiveMoves:
    """Owner of the moves under way, and of the workers that are being emptied. `advance` is called in every turn of the loop."""

    def __init__(self) -> None:
        self._moves: dict[str, LiveMove] = {}
        self._leaving: list[WorkerLane] = []
        self._numbers = itertools.count()
        self._dropping: set[asyncio.Task[None]] = set()

    def empty(self, core: AnyCore, lane: WorkerLane) -> None:
        """Move all groups of a worker to others, as these have room. Those that cannot move are requeued at once."""
        core.send_back(lane.number, keep_movable=True)
        if lane not in self._leaving:
            self._leaving.append(lane)

    def stay(self, lane: WorkerLane) -> None:
        """Begin no more moves from a worker."""
        if lane in self._leaving:
            self._leaving.remove(lane)

    def advance(self, core: AnyCore | None, lanes: list[WorkerLane]) -> None:
        """Continue the moves under way, and begin others. `lanes`: those to connected workers."""
        for move in list(self._moves.values()):
            self._continue(core, move)
        for lane in list(self._leaving):
            if core is None or not lane.is_draining or not lane.is_here:
                self.stay(lane)
            else:
                self._empty(core, lane, lanes)
        if core is not None and len(lanes) > 1 and not core.has_worker_per_lane:
            self._relieve(core, lanes)

    # --- beginning ------------------------------------------------------------------------------------------------

    def _empty(self, core: AnyCore, lane: WorkerLane, lanes: list[WorkerLane]) -> None:
        num_free = _MOST_AT_ONCE - self._num_from(lane)
        names = (name for name in live_move.movable(core.workers[lane.number]) if name not in self._moves)
        for name in itertools.islice(names, max(0, num_free)):
            self._begin(
                core,
                name,
                lane,
                [other for other in lanes if live_move.has_room(name, core.workers, other.number)],
            )

    def _relieve(self, core: AnyCore, lanes: list[WorkerLane]) -> None:
        """Where a group would soon be preempted for lack of blocks, move the one that started last to a worker with many."""
        for lane in lanes:
            if live_move.is_short(core.workers[lane.number]) and not self._num_from(lane):
                for name in live_move.movable(core.workers[lane.number])[-1:]:
                    self._begin(
                        core,
                        name,
                        lane,
                        [o for o in lanes if live_move.has_spare_room(name, core.workers, o.number)],
                    )

    def _num_from(self, lane: WorkerLane) -> int:
        return sum(move.source is lane for move in self._moves.values())

    def _begin(self, core: AnyCore, name: str, source: WorkerLane, able: list[WorkerLane]) -> None:
        """Begin to move to the worker of `able` that runs the fewest sequences, those on their way to it included."""
        found = live_move.residence(name, core.workers)
        able = [lane for lane in able if lane is not source and not lane.is_draining]
        if found is None or not able:
            return
        coming = [move.target.number for move in self._moves.values()]
        target = min(able, key=lambda lane: len(core.workers[lane.number].state.running) + coming.count(lane.number))
        self._moves[name] = self._begun(name, found, source, target)

    def _begun(self, name: str, found: Residence, source: WorkerLane, target: WorkerLane) -> LiveMove:
        image = f"{name} {next(self._numbers)}"
        full = found.blocks[: found.num_full]
        return LiveMove(
            name=name,
            image=image,
            source=source,
            target=target,
            ticket=found.ticket,
            epochs=(source.planner.epoch, target.planner.epoch),
            num_sent=len(full),
            fetching=target.fetch(image, 0, source, full),
        )

    # --- continuing -----------------------------------------------------------------------------------------------

    def _continue(self, core: AnyCore | None, move: LiveMove) -> None:
        found = live_move.residence(move.name, core.workers) if core is not None and move.is_of_both else None
        if core is None or found is None or (found.worker, found.ticket) != (move.source.number, move.ticket):
            self._give_up(core, move, "it ended, was preempted, or a worker was lost")
        elif move.fetching.done():
            self._take_blocks(core, move, found)

    def _take_blocks(self, core: AnyCore, move: LiveMove, found: Residence) -> None:
        try:
            answer = move.fetching.result()
        except QuireError as error:
            self._fail(core, move, error)
            return
        if not move.held_ns:
            move.num_bytes += answer.num_bytes
            move.held_ns = monotonic_ns()
            core.hold(move.name)
        if move.is_last:
            self._hand_over(core, move, answer)
        elif found.is_quiet:
            rest = found.blocks[move.num_sent :]
            move.fetching, move.is_last = move.target.fetch(move.image, move.num_sent, move.source, rest), True

    def _hand_over(self, core: AnyCore, move: LiveMove, answer: worker_pb2.FetchBlocksResponse) -> None:
        if not core.hand_over(move.name, move.target.number, move.image):
            self._give_up(core, move, "there is no room any more")
            return
        del self._moves[move.name]
        now_ns, how = monotonic_ns(), "shared memory" if answer.is_shared else "the network"
        log.info(
            "%s goes on on worker %s: %d bytes through %s in %.3f s, held for %.3f s",
            move.name,
            move.target.address,
            move.num_bytes + answer.num_bytes,
            how,
            (now_ns - move.began_ns) / NS_PER_S,
            (now_ns - move.held_ns) / NS_PER_S,
        )

    def _fail(self, core: AnyCore, move: LiveMove, error: QuireError) -> None:
        """Have the groups of that worker computed again elsewhere: the next move would fail alike."""
        log.warning("%s cannot move to worker %s: %s; it is computed again", move.name, move.target.address, error)
        self._give_up(core, move, str(error))
        if move.source in self._leaving:
            self.stay(move.source)
            core.send_back(move.source.number)

    def _give_up(self, core: AnyCore | None, move: LiveMove, why: str) -> None:
        log.info("%s does not move to worker %s: %s", move.name, move.target.address, why)
        del self._moves[move.name]
        move.fetching.cancel()
        if core is not None:
            core.let_go(move.name)
        if move.target.is_here:
            dropping = asyncio.create_task(move.target.drop_image(move.image, move.epochs[1]), name="drop-image")
            self._dropping.add(dropping)
            dropping.add_done_callback(self._dropping.discard)
