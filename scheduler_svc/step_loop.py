"""The engine loop: own a worker, then plan, run and publish one step after the other, for as long as the process lives.

Owner of the core and of the row planner. `_in_flight` holds the plans without a result: with overlap as many as the policy plans
ahead (plan k+1 is sent before result k is read), else one. Inputs are taken before each plan (`intake`).
"""

import asyncio
import logging
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from protos.worker.v1 import worker_pb2
from scheduler_svc import policy_change
from scheduler_svc.core.plan import StepOutcome, StepPlan
from scheduler_svc.core_keeper import CoreKeeper
from scheduler_svc.explanations import Explanations
from scheduler_svc.intake import Intake
from scheduler_svc.live_request import LiveRequest, Place
from scheduler_svc.policy_choice import PolicyChoice
from scheduler_svc.readiness import Readiness
from scheduler_svc.recording.recorder import AnyCore
from scheduler_svc.recording.tape import Tape
from scheduler_svc.request_book import RequestBook
from scheduler_svc.row_planner import RowPlanner, RowSampling, WorkerResult
from scheduler_svc.settings import SchedulerSettings
from scheduler_svc.step_log import StepLog
from scheduler_svc.worker_link import Ownership, WorkerLink, WorkerLostError
from svc_common.clock import NS_PER_S, monotonic_ns
from svc_common.errors import InvalidArgument, Unavailable

log = logging.getLogger(__name__)

_BLOCKED_S = 0.01
_UNSERVED_CHECK_S = 1.0
_BUG_PAUSE_S = 0.1
_MAX_BREAKS = 2
_PREEMPTIONS_PER_WARNING = 50
_NEW_EPOCH_STATUSES = frozenset({"UNAVAILABLE", "INVALID_ARGUMENT"})


@dataclass(frozen=True, slots=True)
class _Sent:
    """A plan without a result, as it was sent."""

    plan: StepPlan
    message: worker_pb2.SchedulerOutputs


class StepLoop:
    """Runs until cancelled. Reads `book`, writes `book`, `step_log` and `readiness`."""

    def __init__(
        self,
        settings: SchedulerSettings,
        choice: PolicyChoice,
        link: WorkerLink,
        book: RequestBook,
        step_log: StepLog,
        readiness: Readiness,
        explanations: Explanations,
        tape: Tape,
    ) -> None:
        self._settings = settings
        self._keeper = CoreKeeper(choice, tape, max_under_way=None if settings.overlap else 1)
        self._link = link
        self._book = book
        self._log = step_log
        self._readiness = readiness
        self._explanations = explanations
        self._intake = Intake(book)
        self._planner = RowPlanner(0)
        self._owned: Ownership | None = None
        self._in_flight: deque[_Sent] = deque()
        self._num_breaks = 0
        self._unserved_since_ns = monotonic_ns()

    @property
    def core(self) -> AnyCore | None:
        """The core in force; None before a worker has said how many blocks it has."""
        return self._keeper.core

    async def run(self) -> None:
        """For ever: own a worker, step until it is lost."""
        while True:
            try:
                self._adopt(await self._wait_for_worker())
                await self._steps()
            except WorkerLostError as error:
                self._lost(error)
            except Exception as bug:
                log.exception("a bug in the scheduler; starting over with the requests as they are")
                self._discard_core()
                self._lost(WorkerLostError(f"the scheduler failed: {type(bug).__name__}", refused=True))
                await asyncio.sleep(_BUG_PAUSE_S)

    async def _steps(self) -> None:
        for sent in self._in_flight:
            await self._link.send(sent.message)
        while True:
            self._intake.take_ends(self.core)
            self._take_requests()
            sent = await self._dispatch()
            if self._in_flight and not (sent and self._has_room()):
                self._settle(await self._result())
            elif not sent:
                await self._idle(_BLOCKED_S if self._has_work() else None)

    def _has_room(self) -> bool:
        """Whether another plan may go out before a result is read. Filling the pipeline comes first (R147)."""
        assert self.core is not None
        return self._settings.overlap and len(self._in_flight) < self.core.depth

    def set_policy(self, settings: Sequence[str]) -> tuple[int, list[policy_change.Change]]:
        """Other values for "KEY=VALUE" keys: the first step by them, and what is another. ConfigError, and nothing changed.

        Without a worker they are kept for the core that is to be built.
        """
        return self._keeper.change_policy(settings, self._owned)

    # --- one step -------------------------------------------------------------------------------------------------

    def _take_requests(self) -> None:
        assert self.core is not None and self._owned is not None
        self._intake.take_requests(self.core, self._owned.limits)

    def _has_work(self) -> bool:
        assert self.core is not None
        return self.core.has_unfinished or self._planner.num_rows > 0

    async def _dispatch(self) -> bool:
        """Plans and sends, if the pipeline has room; whether anything went out. A plan with nothing to compute does if the worker may
        forget rows by it."""
        if not self._has_work() or (self._in_flight and not self._has_room()):
            return False
        assert self.core is not None
        plans = self.core.schedule(monotonic_ns() / NS_PER_S)
        for plan in plans:
            self._announce(plan)
        worth_sending = [plan for plan in plans if not plan.is_empty or plan.left]
        for plan in worth_sending:
            sent = _Sent(plan, self._planner.encode(plan, self._sampling))
            self._in_flight.append(sent)
            await self._link.send(sent.message)
        return bool(worth_sending)

    def _announce(self, plan: StepPlan) -> None:
        """Tells everybody what is known of a plan before its result."""
        assert self.core is not None
        moves = plan.swap_in or plan.swap_out or plan.copy
        self._log.begin(plan, self._planner.epoch, self.core.block_tables() if moves else None)
        self._explanations.observe(plan)
        first = plan.num_cumulative_preemptions - len(plan.preempted) + 1
        for number, (request_id, mode) in enumerate(plan.preempted, first):
            self._book.preempted(request_id, plan.step, mode)
            if number % _PREEMPTIONS_PER_WARNING == 1:
                log.warning("preemption %d since the start: request %s, by %s", number, request_id, mode)
        for entry in plan.scheduled:
            if entry.fresh:
                request = self.core.request(entry.request_id)
                self._book.scheduled(entry.request_id, plan.step, (request and request.num_cached_tokens) or 0)
        self._end_all(StepOutcome(ended=plan.ended))

    def _sampling(self, request_id: str) -> RowSampling:
        live = self._book.in_core(request_id)
        assert live is not None
        return live.submission.sampling

    async def _result(self) -> WorkerResult:
        """The oldest plan's result. WorkerLostError when there will be none."""
        result = None
        while result is None:
            message = await self._link.receive()
            try:
                result = self._planner.decode(message)
            except InvalidArgument as error:
                self._link.forget_epoch()
                raise WorkerLostError(f"a result cannot be read: {error}") from None
        self._check_rows(result)
        return result

    def _check_rows(self, result: WorkerResult) -> None:
        """After these errors the worker's rows are not what the planner takes them for."""
        if result.error is not None and result.error.status in _NEW_EPOCH_STATUSES:
            self._link.forget_epoch()
            raise WorkerLostError(f"step {result.result.step}: {result.error.message}")

    def _settle(self, result: WorkerResult) -> None:
        """Applies and publishes the oldest plan's result."""
        assert self.core is not None
        plan = self._in_flight.popleft().plan
        self._num_breaks = 0
        if not self._readiness.serving and self._owned is not None:
            self._readiness.ready(self._owned.limits, self._owned.bundle)
        self._log.complete(result)
        if plan.is_empty:
            return
        if result.error is not None:
            log.error("step %d failed at the worker: %s", plan.step, result.error.message)
            self._end_all(self.core.fail_step(plan.step, result.error.message))
        else:
            outcome = self.core.update(result.result, monotonic_ns() / NS_PER_S)
            self._measure(plan, result)
            for run in outcome.runs:
                self._book.put_tokens(run, plan.step, result.logprobs.get(run.name))
            self._end_all(outcome)
        self._check_integrity(plan.step)

    def _measure(self, plan: StepPlan, result: WorkerResult) -> None:
        """What steps cost is an input of the core."""
        num_moved = len(plan.swap_in) + len(plan.swap_out)
        self._keeper.observe_cost(plan.num_tokens, num_moved, result.duration_ns)

    def _end_all(self, outcome: StepOutcome) -> None:
        for ended in outcome.ended:
            self._book.sequence_ended(ended)

    def _check_integrity(self, step: int) -> None:
        """By sampling; a violation is reported and the service goes on."""
        every = self._settings.integrity_check_every
        if every and step % every == 0 and self.core is not None:
            for violation in self.core.check_integrity():
                log.error("block ledger after step %d: %s", step, violation)

    # --- waiting --------------------------------------------------------------------------------------------------

    async def _idle(self, at_most_s: float | None = None) -> None:
        """Until there is an input or a deadline. WorkerLostError when the stream ends meanwhile."""
        await self._wait_for(self._link.stream_end, at_most_s)
        if self._link.stream_end.done():
            await self._result()

    def _seconds_to_deadline(self, at_most_s: float | None) -> float | None:
        deadline_ns = self._book.next_deadline_ns()
        if deadline_ns is None:
            return at_most_s
        seconds = max(0.0, (deadline_ns - monotonic_ns()) / NS_PER_S)
        return seconds if at_most_s is None else min(seconds, at_most_s)

    # --- workers come and go --------------------------------------------------------------------------------------

    async def _wait_for_worker(self) -> Ownership:
        """Attaches; meanwhile requests queue, and cancels and deadlines are served."""
        attaching = asyncio.create_task(self._link.attach(), name="attach-worker")
        try:
            while not attaching.done():
                self._intake.take_ends(self.core)
                self._fail_unserved()
                await self._wait_for(attaching, _UNSERVED_CHECK_S)
            return attaching.result()
        finally:
            attaching.cancel()

    async def _wait_for(self, other: asyncio.Task[Any], at_most_s: float | None) -> None:
        """Until there is an input or a deadline, or `other` is done."""
        wake = asyncio.ensure_future(self._book.wake.wait())
        try:
            timeout_s = self._seconds_to_deadline(at_most_s)
            await asyncio.wait({wake, other}, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        finally:
            wake.cancel()
        self._book.wake.clear()

    def _fail_unserved(self) -> None:
        if self._readiness.warming:
            self._unserved_since_ns = monotonic_ns()
        too_long_ns = monotonic_ns() - int(self._settings.no_worker_timeout_s * NS_PER_S)
        if too_long_ns >= self._unserved_since_ns:
            self._intake.fail_unserved(self.core, too_long_ns, self._readiness.reason)

    def _lost(self, error: WorkerLostError) -> None:
        """The stream is gone. Whether the steps that are out are lost too is known when the worker answers again."""
        log.warning("worker %s lost: %s", self._link.address, error)
        self._num_breaks += 1
        if self._num_breaks >= _MAX_BREAKS or error.refused:
            self._link.forget_epoch()
        self._link.drop()
        self._unserved_since_ns = monotonic_ns()
        self._readiness.not_ready(f"the worker at {self._link.address} was lost: {error}")

    def _discard_core(self) -> None:
        """A bug of our own: the core is not to be trusted, and whichever request brought it there must not for ever."""
        self._keeper.discard()
        for live in self._book.live():
            live.num_losses += live.place is Place.IN_CORE

    def _adopt(self, owned: Ownership) -> None:
        """Steps can run; where one is out still, that is shown by its result."""
        if not owned.resumed:
            self._begin_epoch(owned)
        self._owned = owned
        self._book.worker_id = owned.worker_boot_id
        if not self._in_flight:
            self._readiness.ready(owned.limits, owned.bundle)
        log.info("worker %s: epoch %d, resumed: %s", self._link.address, owned.epoch, owned.resumed)

    def _begin_epoch(self, owned: Ownership) -> None:
        """The worker holds nothing: all that ran waits again with its tokens."""
        self._intake.take_ends(self.core)
        in_step = {entry.request_id for sent in self._in_flight for entry in sent.plan.scheduled}
        self._in_flight.clear()
        self._num_breaks = 0
        self._log.fail_open("the worker was lost")
        self._log.forget_tables()
        for live in self._book.live():
            if live.place is Place.IN_CORE and not self._book.lost_its_worker(live, in_step=live.core_id in in_step):
                self._intake.leave_core(live, self.core)
                self._book.fail(live, _poisonous(live))
        if self.core is not None and _is_alike(self._owned, owned):
            self.core.reset_sequences_of_lost_worker()
        else:
            self._build_core(owned)
        self._planner = RowPlanner(self._keeper.most_rows(owned), epoch=owned.epoch)

    def _build_core(self, owned: Ownership) -> None:
        """A core for what this worker has; requests of the old one enter it as if they came anew, with their tokens."""
        self._log.policy = self._keeper.build(owned).policy
        for live in self._book.live():
            if live.place is not Place.IN_CORE:
                continue
            if live.tokens and self._owned is not None and self._owned.limits.model_digest != owned.limits.model_digest:
                self._book.fail(live, Unavailable("the worker came back with another model", reason="MODEL_CHANGED"))
            else:
                self._book.back_to_pending(live)


def _is_alike(before: Ownership | None, now: Ownership) -> bool:
    """Same cache and same model: the core goes on as it is."""
    return before is not None and before.cache == now.cache and before.limits == now.limits


def _poisonous(live: LiveRequest) -> Unavailable:
    return Unavailable(
        f"{live.num_losses} workers in a row were lost while they ran this request; it is not tried again",
        reason="WORKER_LOST_REPEATEDLY",
        metadata={"losses": str(live.num_losses)},
    )
