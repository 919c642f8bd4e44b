"""The engine loop: plan, send and settle steps for as long as the process lives.

`step_pipelining` shows a turn with and without overlap, and says whether there is room for a plan; `settling` is
what announce and settle do; `intake` takes the inputs; `lane_keeper` handles workers that connect and fail.

A worker that was granted steps (`core/policies/mixed/decode_grants`) begins the next one by itself, which its result says;
the plan of that step is made at once, and is not sent. Inputs meanwhile may revoke the grant.

Each worker group is planned when it is free. Ranks are planned for together once all are done, as Chitu's collector does;
one without work gets no message and no step in the log. Results are taken in the order of arrival.
"""

import asyncio
import logging
from collections.abc import Callable, Sequence

from scheduler_svc.core.plan import StepPlan
from scheduler_svc.core.state import CoreState
from scheduler_svc.loop import policy_change
from scheduler_svc.loop.coarse_timer import Alarm
from scheduler_svc.loop.core_keeper import CoreKeeper
from scheduler_svc.loop.intake import LoopIntake
from scheduler_svc.loop.lane_keeper import LaneKeeper
from scheduler_svc.loop.settling import StepSettling
from scheduler_svc.loop.step_pipelining import StepPipelining
from scheduler_svc.observe.recording.record_buffer import RecordBuffer
from scheduler_svc.observe.recording.recorder import AnyCore
from scheduler_svc.observe.step_notifier import StepNotifier
from scheduler_svc.observe.step_record import StepOrigin
from scheduler_svc.policy.choice import PolicyChoice
from scheduler_svc.readiness import Readiness
from scheduler_svc.requests.request_book import RequestBook
from scheduler_svc.settings import SchedulerSettings
from scheduler_svc.worker_values import RowSampling, WorkerResult
from scheduler_svc.workers.lane import WorkerLane
from scheduler_svc.workers.link import WorkerLostError
from scheduler_svc.workers.roster import WorkerRoster
from svc_common.clock import NS_PER_S, monotonic_ns

log = logging.getLogger(__name__)

_BLOCKED_S = 0.01
_CHECK_S = 0.1
_UNSERVED_CHECK_S = 1.0
_BUG_PAUSE_S = 0.1


class StepLoop:
    """Runs until cancelled. Reads and writes `book` and `readiness`. `roster`: the lanes to all workers; `steps`: the observers.

    `adapter_id(name)`: id of a loaded adapter; raises NotFound. `on_states`: see `CoreKeeper`.
    """

    def __init__(
        self,
        settings: SchedulerSettings,
        choice: PolicyChoice,
        roster: WorkerRoster,
        book: RequestBook,
        steps: StepNotifier,
        readiness: Readiness,
        record_buffer: RecordBuffer,
        adapter_id: Callable[[str], int],
        on_states: Callable[[Sequence[CoreState]], None],
    ) -> None:
        self._no_worker_timeout_ns = int(settings.no_worker_timeout_s * NS_PER_S)
        self._keeper = CoreKeeper(choice, record_buffer, on_states, overlap=settings.overlap, grants=settings.grants)
        self._book = book
        self._readiness = readiness
        self._settling = StepSettling(book, steps)
        self._intake = LoopIntake(book, adapter_id)
        self._lanes = LaneKeeper(roster, self._keeper, book, self._intake, steps, readiness)
        self._pipelining = StepPipelining(self._keeper, self._lanes)
        self._alarm = Alarm(self._lanes.on_news)
        self._unserved_since_ns: int | None = None

    @property
    def core(self) -> AnyCore | None:
        """The core in use; None before the workers have reported their block counts."""
        return self._keeper.core

    async def run(self) -> None:
        """Run turns until cancelled. After an unexpected exception, discard the core and continue with the live requests."""
        while True:
            try:
                await self._turn()
            except Exception as bug:
                log.exception("a bug in the scheduler; starting over with the requests as they are")
                self._lanes.discard_core(f"the scheduler failed: {type(bug).__name__}")
                await asyncio.sleep(_BUG_PAUSE_S)

    def set_policy(self, settings: Sequence[str]) -> tuple[int, list[policy_change.Change]]:
        """Change the policy by "KEY=VALUE" settings; returns the first step under it and the changed values.

        Raises ConfigError, and then nothing has changed. Without workers, the settings apply to the core
        built next.
        """
        return self._keeper.change_policy(settings, self._lanes.workers)

    def drain_worker(self, address: str, *, undo: bool, move: bool) -> int:
        """Start no more requests on the worker at that address, or `undo` that; `move`: those on it continue on others.

        Returns how many groups are left there. Raises NotFound, and FailedPrecondition for ranks and for the last worker.
        """
        return self._lanes.drain(address, undo=undo, move=move)

    async def _turn(self) -> None:
        self._intake.take_ends(self._keeper.core)
        await self._lanes.meet()
        core, workers = self._keeper.core, self._lanes.workers
        if core is None or workers is None or not self._lanes.here:
            self._fail_unserved()
            await self._idle(_UNSERVED_CHECK_S)
            return
        self._unserved_since_ns = None
        self._intake.take_requests(core, workers.limits)
        self._lanes.moves.advance(core, self._lanes.here)
        went_out = await self._dispatch()
        busy = self._pipelining.busy()
        if went_out and self._pipelining.ready():
            return
        if busy:
            await self._wait_for(core, busy)
        elif not went_out:
            await self._idle(_BLOCKED_S if self._pipelining.has_work() else None)

    # --- sending plans --------------------------------------------------------------------------------------------

    async def _dispatch(self) -> bool:
        """Plan and send, if there is work and room; True if anything was sent."""
        if not self._pipelining.has_work():
            return False
        went_out = False
        for worker in self._pipelining.ready():
            for lane, plan in self._plan(worker):
                went_out = True
                try:
                    await lane.send(plan, self._sampling)
                except WorkerLostError as error:
                    self._lanes.lose(lane, error)
        return went_out

    def _plan(self, worker: int | None) -> list[tuple[WorkerLane, StepPlan]]:
        """Make plans for a worker, or all ranks, and pass them to observers and requests. Returns those to send, each with
        the lane to its worker.

        A plan without work is sent if it lets the worker drop rows.
        """
        core, planned = self._keeper.core, []
        assert core is not None
        began_ns = monotonic_ns()
        plans = core.schedule(began_ns / NS_PER_S, worker)
        took_ns = monotonic_ns() - began_ns
        for plan in plans:
            lane = self._lanes.lanes[core.worker_of(plan.lane)]
            self._announce(core, plan, lane, began_ns, took_ns)
            if plan.left or not plan.is_empty:
                planned.append((lane, plan))
        return planned

    def _announce(self, core: AnyCore, plan: StepPlan, lane: WorkerLane, began_ns: int, took_ns: int) -> None:
        origin = StepOrigin(
            planned_ns=began_ns,
            schedule_ns=took_ns,
            epoch=lane.planner.epoch,
            step_id=lane.planner.last_step_id + 1,
            worker=lane.number,
            worker_id=lane.boot_id,
            rank=lane.number if core.num_workers > 1 else None,
        )
        self._settling.announce(core, plan, origin)

    def _sampling(self, request_id: str) -> RowSampling:
        live = self._book.in_core(request_id)
        assert live is not None and self._lanes.workers is not None
        adapter_id = live.request.lora_id if live.request is not None else 0
        return live.submission.row_sampling(self._lanes.workers.limits, adapter_id)

    # --- granted steps --------------------------------------------------------------------------------------------

    async def _revoke_grants(self, core: AnyCore, busy: list[WorkerLane]) -> None:
        """Revoke the grants of those workers for which something else is to be planned."""
        for lane in busy:
            if core.wants_step_back(lane.number):
                core.revoke(lane.number)
                try:
                    await lane.revoke()
                except WorkerLostError as error:
                    self._lanes.lose(lane, error)

    def _follow(self, lane: WorkerLane) -> None:
        """Plan the granted step that the worker has begun."""
        core, began_ns = self._keeper.core, monotonic_ns()
        assert core is not None
        plan = core.repeat(began_ns / NS_PER_S, lane.number)
        self._announce(core, plan, lane, began_ns, monotonic_ns() - began_ns)
        lane.follow(plan)

    # --- taking results -------------------------------------------------------------------------------------------

    async def _wait_for(self, core: AnyCore, busy: list[WorkerLane]) -> None:
        """Wait for results of those workers, or an input where it matters, and take the oldest result of each that has one."""
        await self._revoke_grants(core, busy)
        left_s = max(0.0, min(map(WorkerLane.patience_left_s, busy)))
        if self._pipelining.reads_inputs():
            await self._idle(left_s)
            return
        self._alarm.within(self._at_most(left_s))
        await self._lanes.news.wait()
        self._sweep()

    def _sweep(self) -> None:
        """Take at most one result of each worker, without waiting, and notice lost workers."""
        self._lanes.news.clear()
        for lane in self._lanes.here:
            try:
                answer = lane.take_result()
            except WorkerLostError as error:
                self._lanes.lose(lane, error)
                continue
            if answer is not None:
                self._settle(*answer)
                if answer[1].continues:
                    self._follow(lane)
        if any(map(WorkerLane.has_news, self._lanes.lanes)):
            self._lanes.on_news()

    def _settle(self, plan: StepPlan, result: WorkerResult) -> None:
        """Apply a result to the core and deliver it. Requests that ended while the step ran get none of its tokens."""
        core = self._keeper.core
        assert core is not None
        if not self._readiness.serving:
            self._lanes.show_ready()
        if result.error is None and not plan.is_empty:
            self._intake.take_ends(core)
        self._settling.settle(core, plan, result)

    # --- waiting --------------------------------------------------------------------------------------------------

    async def _idle(self, at_most_s: float | None = None) -> None:
        """Wait for an input, a deadline, news of a worker, or `at_most_s`."""
        self._alarm.within(self._seconds_to_deadline(self._at_most(at_most_s)))
        await self._book.wake.wait()
        self._book.wake.clear()
        if self._lanes.news.is_set():
            self._sweep()

    def _at_most(self, seconds: float | None) -> float | None:
        """Cap a wait while one of several workers is away or busy, so that slow workers are noticed."""
        if len(self._lanes.lanes) == 1 or not (
            self._pipelining.busy() or len(self._lanes.here) < self._lanes.num_wanted
        ):
            return seconds
        return _CHECK_S if seconds is None else min(seconds, _CHECK_S)

    def _seconds_to_deadline(self, at_most_s: float | None) -> float | None:
        deadline_ns = self._book.deadlines.earliest()
        if deadline_ns is None:
            return at_most_s
        seconds = max(0.0, (deadline_ns - monotonic_ns()) / NS_PER_S)
        return seconds if at_most_s is None else min(seconds, at_most_s)

    def _fail_unserved(self) -> None:
        """Fail requests that have waited `no_worker_timeout_s` without a worker; time spent loading a model does not count."""
        if self._unserved_since_ns is None or self._readiness.warming:
            self._unserved_since_ns = monotonic_ns()
        too_long_ns = monotonic_ns() - self._no_worker_timeout_ns
        if too_long_ns >= self._unserved_since_ns:
            self._intake.fail_unserved(self._keeper.core, too_long_ns, self._readiness.reason)
