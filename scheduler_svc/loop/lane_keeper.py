"""Connecting and losing workers: for which of them the core is built, and what becomes of a lost worker's sequences.

A worker that reconnects in its epoch continues with the state it holds. Otherwise its sequences are requeued
with their tokens. If another worker is connected, they are requeued without waiting for the reconnect.

The core is built when the first worker is connected, and others join it; ranks, which run in lockstep, are waited for.
"""

import asyncio
import logging
from collections.abc import Sequence

from scheduler_svc.loop.core_keeper import CoreKeeper, Workers
from scheduler_svc.loop.intake import LoopIntake
from scheduler_svc.loop.live_moves import LiveMoves
from scheduler_svc.observe.step_notifier import StepNotifier
from scheduler_svc.readiness import Readiness
from scheduler_svc.requests.live_request import LiveRequest, RequestStage
from scheduler_svc.requests.request_book import RequestBook
from scheduler_svc.workers.lane import WorkerLane
from scheduler_svc.workers.link import OwnedStream, WorkerLostError
from scheduler_svc.workers.roster import WorkerRoster
from svc_common.errors import FailedPrecondition, NotFound, Unavailable

log = logging.getLogger(__name__)

_RETURN_S = 0.5
"""Time for a worker with a broken stream to reconnect in its epoch, before other workers take its sequences over."""


class LaneKeeper:
    """Owner of the lanes to all workers. `workers`: what the current core, or the previous one, was built for.

    `here`: the lanes to connected workers. `moves`: the groups on their way from one to another. `news` is set when a lane has
    something to take; the waiting code clears it.
    """

    def __init__(
        self,
        roster: WorkerRoster,
        keeper: CoreKeeper,
        book: RequestBook,
        intake: LoopIntake,
        steps: StepNotifier,
        readiness: Readiness,
    ) -> None:
        self.lanes = roster.lanes
        self.here: list[WorkerLane] = []
        self.workers: Workers | None = None
        self.news = asyncio.Event()
        self.moves = LiveMoves()
        self._keeper = keeper
        self._book = book
        self._intake = intake
        self._steps = steps
        self._readiness = readiness
        self._roster = roster
        roster.listen(self.on_news)

    @property
    def num_wanted(self) -> int:
        """Number of workers, connected or not."""
        return len(self._roster.wanted)

    def on_news(self) -> None:
        """Signal that a lane has something to take."""
        self.news.set()
        self._book.wake.set()

    def show_ready(self) -> None:
        """Report the service as ready, because steps complete or can."""
        if self.workers is not None and not self._readiness.serving:
            self._readiness.ready(self.workers.limits, self.workers.bundle)

    # --- connecting -----------------------------------------------------------------------------------------------

    async def meet(self) -> None:
        """Adopt workers that connected, give up those that stay away, and build the core once one is connected, or all ranks."""
        self._follow()
        if len(self.here) < len(self._roster.wanted):
            await self._attach()
            self._hand_over()
        if self._keeper.core is None:
            self._build()

    def _follow(self) -> None:
        """Take up new addresses of workers, and remove the lanes to those that vanished: connected ones when they are empty."""
        core = self._keeper.core
        for lane in self._roster.follow():
            if core is not None:
                self._keeper.expect(lane.number)
        for lane in self._roster.vanished():
            if lane.is_here and not self._is_empty(lane):
                if core is not None and not lane.is_draining and self._is_spared(lane):
                    lane.is_draining = True
                    core.drain_worker(lane.number)
                continue
            self._remove(lane)

    def _is_empty(self, lane: WorkerLane) -> bool:
        core = self._keeper.core
        return not lane.in_flight and (core is None or (lane.is_draining and core.states[lane.number].is_idle))

    def _is_spared(self, lane: WorkerLane) -> bool:
        """True if another worker could take its requests."""
        return any(other.is_here and not other.is_draining for other in self.lanes if other is not lane)

    def _remove(self, lane: WorkerLane) -> None:
        """Requeue what is left on the worker, and end the connection."""
        log.info("the worker at %s is not among the addresses any more", lane.address)
        lane.renew()
        self._let_go(lane)
        self._look()
        lane.is_gone, lane.is_draining = True, False
        if self._keeper.core is not None:
            self._keeper.core.remove_worker(lane.number)

    async def _attach(self) -> None:
        for lane in self._roster.wanted:
            lane.attach()
            owned = lane.take_ownership()
            if owned is not None:
                self._look()
                await self._adopt(lane, resumed=owned.resumed)

    def _look(self) -> None:
        """Update `here` after a worker connected or was lost."""
        self.here = [lane for lane in self.lanes if lane.is_here]

    async def _adopt(self, lane: WorkerLane, *, resumed: bool) -> None:
        """Take a connected worker into service. If a step is in flight there, its result will show readiness instead."""
        if not resumed:
            self._begin(lane)
        else:
            try:
                await lane.resume()
            except WorkerLostError as error:
                self.lose(lane, error)
                return
        self._intake.fail_without_adapter(self._keeper.core)
        if self._keeper.core is not None and not lane.in_flight:
            self.show_ready()

    def _begin(self, lane: WorkerLane) -> None:
        """Begin a new epoch with a worker that holds no rows. Discard the core if models, or ranks' blocks, no longer match it."""
        self._let_go(lane)
        core = self._keeper.core
        if core is None:
            return
        lanes = self.lanes if core.has_worker_per_lane else self.here
        now = self._workers_of([each.owned for each in lanes if each.owned is not None])
        if (
            self.workers is None
            or now.limits != self.workers.limits
            or (core.has_worker_per_lane and not self._fits(now))
        ):
            self._keeper.discard()
            return
        if core.has_worker_per_lane:
            core.take_worker_back(lane.number)
        else:
            assert lane.owned is not None
            self._keeper.join(lane.number, lane.owned, now)
            if lane.is_draining:
                core.drain_worker(lane.number)
            self.workers = now
        lane.begin(self._keeper.most_rows(self.workers))

    def _workers_of(self, owned: Sequence[OwnedStream]) -> Workers:
        return Workers.of(owned, are_ranks=self._keeper.has_ranks)

    def _fits(self, now: Workers) -> bool:
        """True if the workers have the blocks that the core was built for."""
        return self.workers is not None and now.cache == self.workers.cache

    def _build(self) -> None:
        """Build a core for the connected workers; live requests enter it as if new, with their tokens."""
        for lane in self.here:
            if not lane.is_fresh:
                self._let_go(lane)
                lane.renew()
        self._look()
        owned = [lane.owned if lane.is_here else None for lane in self.lanes]
        here = [each for each in owned if each is not None]
        if len(here) < (len(self.lanes) if self._keeper.has_ranks else 1):
            return
        before, self.workers = self.workers, self._workers_of(here)
        self._steps.policy = self._keeper.build(owned).policy
        for live in self._book.live():
            self._move(live, before, self.workers)
        for lane in self.here:
            lane.begin(self._keeper.most_rows(self.workers))
        self.show_ready()

    def _move(self, live: LiveRequest, before: Workers | None, now: Workers) -> None:
        same = before is None or before.limits.model_digest == now.limits.model_digest
        if live.output.num_tokens and not same:
            self._book.fail(live, Unavailable("the worker came back with another model", reason="MODEL_CHANGED"))
        else:
            self._book.back_to_pending(live)

    # --- draining -------------------------------------------------------------------------------------------------

    def drain(self, address: str, *, undo: bool, move: bool) -> int:
        """See `StepLoop.drain_worker`."""
        lane = next((lane for lane in self._roster.wanted if lane.address == address), None)
        if lane is None:
            known = ", ".join(each.address for each in self._roster.wanted)
            raise NotFound(
                f"there is no worker at {address}; there are: {known}",
                reason="UNKNOWN_WORKER",
                resource_type="worker",
                resource_name=address,
            )
        if not undo:
            self._check_drain(lane)
        lane.is_draining = not undo
        core = self._keeper.core
        if core is None:
            return 0
        if undo:
            self.moves.stay(lane)
        if undo and lane.is_here:
            core.take_worker_back(lane.number)
        elif not undo:
            core.drain_worker(lane.number)
            if move:
                self.moves.empty(core, lane)
        self.on_news()
        state = core.states[lane.number]
        return len(state.running) + len(state.swapped)

    def _check_drain(self, lane: WorkerLane) -> None:
        if self._keeper.has_ranks:
            raise FailedPrecondition(
                "the workers are ranks that run in lockstep, and none can be drained alone; `quire drain` drains the scheduler",
                reason="WORKERS_ARE_RANKS",
            )
        if not self._is_spared(lane):
            raise FailedPrecondition(
                f"no other worker could take the requests of {lane.address}; start one, or drain the scheduler: `quire drain`",
                reason="LAST_WORKER",
            )

    # --- losing ---------------------------------------------------------------------------------------------------

    def lose(self, lane: WorkerLane, error: WorkerLostError) -> None:
        """Handle the loss of a worker's stream."""
        lane.lose(error)
        self._look()
        if not self.here:
            self._readiness.stop()

    def discard_core(self, why: str) -> None:
        """Drop the core after a bug in the scheduler, and count a loss for each request in it, so that retries are bounded."""
        self._keeper.discard()
        self._steps.lost_worker([name for lane in self.lanes for name in lane.planner.names], why=why)
        for live in self._book.live():
            live.num_losses += live.place is RequestStage.IN_CORE
        for lane in self.lanes:
            lane.lose(WorkerLostError(why, refused=True))
        self._look()
        self._readiness.stop()

    def _hand_over(self) -> None:
        """Requeue the sequences of workers that stay away, so that other workers continue them."""
        if self._keeper.core is None or self._keeper.core.num_workers == 1 or not self.here:
            return
        for lane in self._roster.wanted:
            if not (lane.is_here or lane.is_void) and lane.seconds >= _RETURN_S:
                log.warning("worker %s does not come back at once: its sequences go on elsewhere", lane.address)
                lane.renew()
                self._let_go(lane)

    def _let_go(self, lane: WorkerLane) -> None:
        """Requeue all sequences that ran on the worker with their tokens, since its KV is lost; fail those with too many losses."""
        if lane.is_void:
            return
        in_step = {entry.request_id for sent in lane.in_flight for entry in sent.plan.scheduled}
        self._steps.lost_worker(lane.planner.names, [sent.plan.step for sent in lane.in_flight], lane.lost_because)
        for live in self._book.live():
            if self._runs_on(live, lane) and not self._book.lost_its_worker(live, in_step=live.core_id in in_step):
                self._intake.leave_core(live, self._keeper.core)
                self._book.fail(live, _poisonous(live))
        lane.empty()
        if self._keeper.core is not None:
            lost = lane.number if self._keeper.core.num_workers > 1 else None
            self._keeper.core.reset_sequences_of_lost_worker(lost)

    def _runs_on(self, live: LiveRequest, lane: WorkerLane) -> bool:
        if live.place is not RequestStage.IN_CORE:
            return False
        core = self._keeper.core
        return core is None or core.num_workers == 1 or live.request is None or core.runs_on(live.request, lane.number)


def _poisonous(live: LiveRequest) -> Unavailable:
    return Unavailable(
        f"{live.num_losses} workers in a row were lost while they ran this request; it is not tried again",
        reason="WORKER_LOST_REPEATEDLY",
        metadata={"losses": str(live.num_losses)},
    )
