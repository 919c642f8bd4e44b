"""The engine loop: plan, run and publish one step after the other, for as long as the process lives.

One worker has as many plans without a result as its policy plans ahead (plan k+1 is sent before result k is read), without overlap
one. Where each lane has a worker, all are planned for together once all are done, as the collector of the reference does (R194): a
rank without work gets no message, and no step in the log. Results are taken as they come. Inputs are taken before each plan
(`intake`); how workers come and go is up to `lane_keeper`.
"""

import asyncio
import logging
from collections.abc import Callable, Sequence

from scheduler_svc.core.plan import StepOutcome, StepPlan
from scheduler_svc.loop import policy_change
from scheduler_svc.loop.coarse_timer import Alarm
from scheduler_svc.loop.core_keeper import CoreKeeper
from scheduler_svc.loop.intake import Intake
from scheduler_svc.loop.lane_keeper import LaneKeeper
from scheduler_svc.loop.publishing import count_drafts, publish
from scheduler_svc.loop.readiness import Readiness
from scheduler_svc.observe.explanations import Explanations
from scheduler_svc.observe.recording.recorder import AnyCore
from scheduler_svc.observe.recording.tape import Tape
from scheduler_svc.observe.request_trace import Moment
from scheduler_svc.observe.step_log import StepLog
from scheduler_svc.policy.choice import PolicyChoice
from scheduler_svc.requests.book import RequestBook
from scheduler_svc.settings import SchedulerSettings
from scheduler_svc.workers.lane import WorkerLane
from scheduler_svc.workers.link import WorkerLostError
from scheduler_svc.workers.result import WorkerResult
from scheduler_svc.workers.row_messages import RowSampling
from svc_common.clock import NS_PER_S, monotonic_ns, unix_ns

log = logging.getLogger(__name__)

_BLOCKED_S = 0.01
_CHECK_S = 0.1
_UNSERVED_CHECK_S = 1.0
_SLOW_S = 0.5
"""A step of a rank that takes longer does not hold the others up."""
_BUG_PAUSE_S = 0.1
_PREEMPTIONS_PER_WARNING = 50


class StepLoop:
    """Runs until cancelled. Reads `book`, writes `book`, `step_log` and `readiness`. `lanes`: to all workers.
    `adapter_id(name)`: of one that requests may name; NotFound."""

    def __init__(
        self,
        settings: SchedulerSettings,
        choice: PolicyChoice,
        lanes: Sequence[WorkerLane],
        book: RequestBook,
        step_log: StepLog,
        readiness: Readiness,
        explanations: Explanations,
        tape: Tape,
        adapter_id: Callable[[str], int],
    ) -> None:
        self._settings = settings
        self._keeper = CoreKeeper(choice, tape, overlap=settings.overlap)
        self._book = book
        self._log = step_log
        self._readiness = readiness
        self._explanations = explanations
        self._intake = Intake(book, adapter_id)
        self._lanes = LaneKeeper(lanes, self._keeper, book, self._intake, step_log, readiness)
        self._alarm = Alarm(self._lanes.on_news)
        self._unserved_since_ns: int | None = None

    @property
    def core(self) -> AnyCore | None:
        """The core in force; None before the workers have said how many blocks they have."""
        return self._keeper.core

    async def run(self) -> None:
        """For ever: one turn after the other."""
        while True:
            try:
                await self._turn()
            except Exception as bug:
                log.exception("a bug in the scheduler; starting over with the requests as they are")
                self._lanes.discard_core(f"the scheduler failed: {type(bug).__name__}")
                await asyncio.sleep(_BUG_PAUSE_S)

    def set_policy(self, settings: Sequence[str]) -> tuple[int, list[policy_change.Change]]:
        """Other values for "KEY=VALUE" keys: the first step by them, and what is another. ConfigError, and nothing changed.

        Without a worker they are kept for the core that is to be built.
        """
        return self._keeper.change_policy(settings, self._lanes.workers)

    async def _turn(self) -> None:
        self._intake.take_ends(self.core)
        await self._lanes.meet()
        if not self._lanes.can_step:
            self._fail_unserved()
            await self._idle(_UNSERVED_CHECK_S)
            return
        self._unserved_since_ns = None
        self._take_requests()
        went_out = await self._dispatch()
        if self._is_busy() and not (went_out and self._has_room()):
            await self._settle_some()
        elif not went_out:
            await self._idle(_BLOCKED_S if self._has_work() else None)

    # --- plans out ------------------------------------------------------------------------------------------------

    def _take_requests(self) -> None:
        assert self.core is not None and self._lanes.workers is not None
        self._intake.take_requests(self.core, self._lanes.workers.limits)

    def _has_work(self) -> bool:
        assert self.core is not None
        return self.core.has_unfinished or any(lane.planner.num_rows for lane in self._lanes.lanes)

    def _is_busy(self) -> bool:
        """Whether there are results to come of workers that are here."""
        return any(lane.in_flight for lane in self._lanes.here)

    def _has_room(self) -> bool:
        """Whether another plan may go out before a result is read. Filling the pipeline comes first (R147).

        Ranks are planned for when all are done, so that tasks that came apart run together again; who is slow is not waited for.
        """
        assert self.core is not None
        here = self._lanes.here
        if self.core.has_worker_per_lane:
            busy = [lane for lane in here if lane.in_flight]
            return len(busy) < len(here) and all(lane.seconds >= _SLOW_S for lane in busy)
        num_in_flight = len(here[0].in_flight)
        return not num_in_flight or (self._keeper.overlaps and num_in_flight < self.core.depth)

    async def _dispatch(self) -> bool:
        """Plans and sends, if the pipeline has room; whether anything went out.

        A plan with nothing to compute goes out if the worker may forget rows by it.
        """
        if not self._has_work() or not self._has_room():
            return False
        assert self.core is not None
        began_ns = monotonic_ns()
        plans = self.core.schedule(began_ns / NS_PER_S)
        took_ns = monotonic_ns() - began_ns
        for plan in plans:
            self._announce(plan, began_ns, took_ns)
        worth_sending = [plan for plan in plans if not plan.is_empty or plan.left]
        for plan in worth_sending:
            await self._send(plan)
        return bool(worth_sending)

    async def _send(self, plan: StepPlan) -> None:
        lane = self._lanes.of(plan)
        try:
            await lane.send(plan, self._sampling)
        except WorkerLostError as error:
            self._lanes.lose(lane, error)

    def _announce(self, plan: StepPlan, began_ns: int, took_ns: int) -> None:
        """Tells everybody what is known of a plan before its result."""
        assert self.core is not None
        lane = self._lanes.of(plan)
        moves = plan.swap_in or plan.swap_out or plan.copy
        tables = self.core.block_tables() if moves else None
        rank = plan.lane if self.core.has_worker_per_lane else None
        self._log.begin(plan, lane.planner.epoch, tables, rank=rank, planned_ns=began_ns, schedule_ns=took_ns)
        self._book.planned(plan, lambda: _moment(plan, lane, began_ns))
        self._explanations.observe(plan)
        first = plan.num_cumulative_preemptions - len(plan.preempted) + 1
        for number, (request_id, mode) in enumerate(plan.preempted, first):
            self._book.preempted(request_id, plan.step, mode)
            if number % _PREEMPTIONS_PER_WARNING == 1:
                about = self._book.log_extra(request_id)
                log.warning("preemption %d since the start: request %s, by %s", number, request_id, mode, extra=about)
        for entry in plan.entries:
            if entry.fresh:
                request = self.core.request(entry.request_id)
                num_cached = (request and request.num_cached_tokens) or 0
                self._book.scheduled(entry.request_id, plan.step, num_cached, lane.boot_id)
        self._end_all(StepOutcome(ended=plan.ended))
        self._log.planned(plan.step)

    def _sampling(self, request_id: str) -> RowSampling:
        live = self._book.in_core(request_id)
        assert live is not None and self._lanes.workers is not None
        adapter_id = live.request.lora_id if live.request is not None else 0
        return live.submission.row_sampling(self._lanes.workers.limits, adapter_id)

    # --- results in -----------------------------------------------------------------------------------------------

    async def _settle_some(self) -> None:
        """Waits for results and takes the oldest of each worker that has one."""
        left_s = min(lane.patience_s - lane.seconds for lane in self._lanes.here if lane.in_flight)
        self._alarm.within(self._at_most(max(0.0, left_s)))
        await self._lanes.news.wait()
        self._sweep()

    def _sweep(self) -> None:
        """Takes what there is, one of each worker; also that a worker is gone."""
        self._lanes.news.clear()
        for lane in self._lanes.here:
            try:
                answer = lane.take_result()
            except WorkerLostError as error:
                self._lanes.lose(lane, error)
                continue
            if answer is not None:
                self._settle(*answer)
        if any(lane.has_news for lane in self._lanes.lanes):
            self._lanes.on_news()

    def _settle(self, plan: StepPlan, result: WorkerResult) -> None:
        """Applies and publishes a result."""
        assert self.core is not None
        self._lanes.show_ready()
        if plan.is_empty:
            self._log.complete(result)
        elif result.error is not None:
            self._log.complete(result)
            self._end_all(self.core.fail_step(plan.step, result.error.message))
        else:
            # Who left while the step ran gets nothing of it (R145).
            self._intake.take_ends(self.core)
            outcome = self.core.update(result.result, monotonic_ns() / NS_PER_S)
            self._measure(plan, result)
            self._log.complete(result, {run.name: run.token_ids for run in outcome.runs} if result.branches else None)
            publish(outcome, result, self._book)
            count_drafts(plan, result.result, self._book.drafts_verified)
            self._end_all(outcome)
        self._check_integrity(plan.step)

    def _measure(self, plan: StepPlan, result: WorkerResult) -> None:
        """What steps cost is an input of the core."""
        num_moved = len(plan.swap_in) + len(plan.swap_out)
        self._keeper.observe_cost(plan.num_tokens, num_moved, result.duration_ns)

    def _end_all(self, outcome: StepOutcome) -> None:
        for ended in outcome.ended:
            self._book.sequence_ended(ended)
            if ended.error is not None and not ended.request_done and self.core is not None:
                self.core.abort([ended.request_id])

    def _check_integrity(self, step: int) -> None:
        """By sampling; a violation is reported and the service goes on."""
        every = self._settings.integrity_check_every
        if every and step % every == 0 and self.core is not None:
            for violation in self.core.check_integrity():
                log.error("block ledger after step %d: %s", step, violation)

    # --- waiting --------------------------------------------------------------------------------------------------

    async def _idle(self, at_most_s: float | None = None) -> None:
        """Until there is an input, a deadline, or news of a worker."""
        self._alarm.within(self._seconds_to_deadline(self._at_most(at_most_s)))
        await self._book.wake.wait()
        self._book.wake.clear()
        self._sweep()

    def _at_most(self, seconds: float | None) -> float | None:
        """While one of several workers is away or slow, the others look up now and then."""
        if len(self._lanes.lanes) == 1 or not (self._is_busy() or len(self._lanes.here) < len(self._lanes.lanes)):
            return seconds
        return _CHECK_S if seconds is None else min(seconds, _CHECK_S)

    def _seconds_to_deadline(self, at_most_s: float | None) -> float | None:
        deadline_ns = self._book.next_deadline_ns()
        if deadline_ns is None:
            return at_most_s
        seconds = max(0.0, (deadline_ns - monotonic_ns()) / NS_PER_S)
        return seconds if at_most_s is None else min(seconds, at_most_s)

    def _fail_unserved(self) -> None:
        """Nobody waits for ever for workers that do not come."""
        if self._unserved_since_ns is None or self._readiness.warming:
            self._unserved_since_ns = monotonic_ns()
        too_long_ns = monotonic_ns() - int(self._settings.no_worker_timeout_s * NS_PER_S)
        if too_long_ns >= self._unserved_since_ns:
            self._intake.fail_unserved(self.core, too_long_ns, self._readiness.reason)


def _moment(plan: StepPlan, lane: WorkerLane, began_ns: int) -> Moment:
    """A plan that goes out next to that lane's worker."""
    step_id = lane.planner.last_step_id + 1
    return Moment(plan.step, unix_ns(began_ns), step_id, lane.planner.epoch, lane.number, lane.boot_id)
