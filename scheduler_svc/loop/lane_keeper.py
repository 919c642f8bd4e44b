"""Connecting and losing workers: for which of them the core is built, and what becomes of a lost worker's sequences.

A worker that reconnects in its epoch continues with the state it holds. Otherwise its sequences are requeued
with their tokens. If the core has one worker per lane and another worker is connected, they are requeued
without waiting for the reconnect.
"""

import asyncio
import logging
from collections.abc import Sequence

from scheduler_svc.loop.core_keeper import CoreKeeper, Workers
from scheduler_svc.loop.intake import LoopIntake
from scheduler_svc.observe.step_notifier import StepNotifier
from scheduler_svc.readiness import Readiness
from scheduler_svc.requests.live_request import LiveRequest, RequestStage
from scheduler_svc.requests.request_book import RequestBook
from scheduler_svc.workers.lane import WorkerLane
from scheduler_svc.workers.link import WorkerLostError
from svc_common.errors import Unavailable

log = logging.getLogger(__name__)

_RETURN_S = 0.5
"""Time for a worker with a broken stream to reconnect in its epoch, before other workers take its sequences over."""


class LaneKeeper:
    """Owner of the lanes to all workers. `workers`: what the current core, or the previous one, was built for.

    `here`: the lanes to connected workers. `news` is set when a lane has something to take; the waiting code clears it.
    """

    def __init__(
        self,
        lanes: Sequence[WorkerLane],
        keeper: CoreKeeper,
        book: RequestBook,
        intake: LoopIntake,
        steps: StepNotifier,
        readiness: Readiness,
    ) -> None:
        self.lanes = list(lanes)
        self.here: list[WorkerLane] = []
        self.workers: Workers | None = None
        self.news = asyncio.Event()
        self._keeper = keeper
        self._book = book
        self._intake = intake
        self._steps = steps
        self._readiness = readiness
        for lane in self.lanes:
            lane.listen(self.on_news)

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
        """Adopt workers that connected, give up those that stay away, and build the core once all are connected."""
        if len(self.here) < len(self.lanes):
            await self._attach()
            self._hand_over()
        if self._keeper.core is None:
            self._build()

    async def _attach(self) -> None:
        for lane in self.lanes:
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
        """Begin a new epoch with a worker that holds no rows. Discard the core if models or block counts no longer match it."""
        self._let_go(lane)
        if self._keeper.core is None:
            return
        if not self._are_alike():
            self._keeper.discard()
            return
        assert self.workers is not None
        lane.begin(self._keeper.most_rows(self.workers))
        if self._keeper.core.has_worker_per_lane:
            self._keeper.core.take_lane_back(lane.number)

    def _are_alike(self) -> bool:
        """True if the connected workers have the blocks and the model that the core was built for."""
        now = Workers.of([lane.owned for lane in self.lanes if lane.owned is not None])
        return self.workers is not None and (now.cache, now.limits) == (self.workers.cache, self.workers.limits)

    def _build(self) -> None:
        """Build a core for all workers once all are connected; live requests enter it as if new, with their tokens."""
        for lane in self.here:
            if not lane.is_fresh:
                self._let_go(lane)
                lane.renew()
        self._look()
        owned = [lane.owned for lane in self.here if lane.owned is not None]
        if len(owned) < len(self.lanes):
            return
        before, self.workers = self.workers, Workers.of(owned)
        self._steps.policy = self._keeper.build(owned).policy
        for live in self._book.live():
            self._move(live, before, self.workers)
        for lane in self.lanes:
            lane.begin(self._keeper.most_rows(self.workers))
        self.show_ready()

    def _move(self, live: LiveRequest, before: Workers | None, now: Workers) -> None:
        same = before is None or before.limits.model_digest == now.limits.model_digest
        if live.output.num_tokens and not same:
            self._book.fail(live, Unavailable("the worker came back with another model", reason="MODEL_CHANGED"))
        else:
            self._book.back_to_pending(live)

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
        """Requeue the sequences of workers that stay away, so that other lanes' workers continue them."""
        if self._keeper.core is None or not self._keeper.core.has_worker_per_lane or not self.here:
            return
        for lane in self.lanes:
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
            lost_lane = lane.number if self._keeper.core.has_worker_per_lane else None
            self._keeper.core.reset_sequences_of_lost_worker(lost_lane)

    def _runs_on(self, live: LiveRequest, lane: WorkerLane) -> bool:
        if live.place is not RequestStage.IN_CORE:
            return False
        if self._keeper.core is None or not self._keeper.core.has_worker_per_lane or live.request is None:
            return True
        return any(group.lane == lane.number for group in live.request.groups)


def _poisonous(live: LiveRequest) -> Unavailable:
    return Unavailable(
        f"{live.num_losses} workers in a row were lost while they ran this request; it is not tried again",
        reason="WORKER_LOST_REPEATEDLY",
        metadata={"losses": str(live.num_losses)},
    )
