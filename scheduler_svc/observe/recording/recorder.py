"""A core wrapper that records every input as an event, with every decision."""

import logging
from collections.abc import Callable, Iterable
from dataclasses import asdict
from typing import Any

import numpy as np

from block_manager.hashing import HashRename
from scheduler_svc.core.composition import live_change
from scheduler_svc.core.fast_decode.share import FastShare
from scheduler_svc.core.limits import CoreLimits, PoolSize
from scheduler_svc.core.parts.costs import Costs
from scheduler_svc.core.plan import EndedSequence, StepOutcome, StepPlan, StepResult
from scheduler_svc.core.request import Request
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.core.spec.policy_spec import PolicySpec
from scheduler_svc.observe.plan_record import PlanFreezer, StepShapeColumns, endings
from scheduler_svc.observe.recording import snapshot
from scheduler_svc.observe.recording.events import (
    AbortEvent,
    Added,
    Changed,
    CostsSeen,
    Drafted,
    Event,
    Failed,
    GroupHeld,
    GroupMoved,
    PlanEvent,
    PrefixesReset,
    Returned,
    Revoked,
    StoppedAt,
    WarmedUp,
    WorkerBack,
    WorkerDrained,
    WorkerGone,
    WorkerLost,
    WorkerPut,
)
from scheduler_svc.observe.recording.inputs import RequestRecord, ResultRecord, column_of, ints, tokens
from scheduler_svc.observe.recording.segment_buffer import SegmentBuffer
from svc_common.errors import QuireError

log = logging.getLogger(__name__)


class RecordingCore:
    """A `Scheduler` with the same methods: inputs are recorded in `buffer`, reads go straight to the core.

    `clock`: seconds, as passed to `schedule`. `about`: what else a replay needs; "max_under_way" is the
    number of plans that the service sends ahead of results. `freezer`: makes the records of plans. An error in
    recording is logged once and turns recording off; scheduling continues.
    """

    def __init__(
        self,
        core: Scheduler,
        buffer: SegmentBuffer,
        clock: Callable[[], float],
        about: dict[str, Any] | None = None,
        freezer: PlanFreezer | None = None,
    ) -> None:
        self.core = core
        self._buffer = buffer
        self._clock = clock
        self._about = about or {}
        self._freezer = freezer or PlanFreezer()
        self._records: dict[str, RequestRecord] = {}
        self._shape: StepShapeColumns | None = None
        self._expected: dict[int, tuple[str, ...]] = {}
        self._fast: dict[int, FastShare] = {}
        self._has_begun = False
        self._is_off = False

    def __getattr__(self, name: str) -> Any:
        """Forward reads to the core."""
        return getattr(self.core, name)

    @property
    def is_recording(self) -> bool:
        """False once recording has failed."""
        return not self._is_off

    @property
    def step(self) -> int:
        """Number of the last plan."""
        return self.core.step

    @step.setter
    def step(self, step: int) -> None:
        self.core.step = step

    # --- requests ----------------------------------------------------------------------------------------------------

    def add(self, request: Request) -> None:
        """As `Scheduler.add`."""
        self._add_request(request, self.core.add, prefilled=False)

    def add_prefilled(self, request: Request) -> None:
        """As `Scheduler.add_prefilled`."""
        self._add_request(request, self.core.add_prefilled, prefilled=True)

    def _add_request(self, request: Request, add: Callable[[Request], None], *, prefilled: bool) -> None:
        record = RequestRecord.of(request)
        refused = ""
        try:
            add(request)
            self._records[request.request_id] = record
        except QuireError as error:
            refused = error.reason
            raise
        finally:
            self._note(Added(self._clock(), record, prefilled, refused))

    def abort(self, request_ids: Iterable[str]) -> list[EndedSequence]:
        """As `Scheduler.abort`."""
        ids = list(request_ids)
        ended = self.core.abort(ids)
        self._note(AbortEvent(self._clock(), ids, endings(ended)))
        self._forget(ended)
        return ended

    def stop_at(self, name: str, num_output_tokens: int) -> list[EndedSequence]:
        """As `Scheduler.stop_at`."""
        ended = self.core.stop_at(name, num_output_tokens)
        self._note(StoppedAt(self._clock(), name, num_output_tokens, endings(ended)))
        self._forget(ended)
        return ended

    # --- steps -------------------------------------------------------------------------------------------------------

    def schedule(self, now: float, worker: int | None = None) -> list[StepPlan]:
        """As `Scheduler.schedule`. First starts a new segment, with a snapshot, if there is none or the current one is full."""
        if self._buffer.is_full or not self._has_begun:
            self._begin()
        try:
            plans = self.core.schedule(now, worker)
        except Exception as error:
            self._note(PlanEvent(now, [], failed=failure(error), worker=worker))
            raise
        self._guard(self._note_plans, now, plans, worker)
        for plan in plans:
            if plan.ended:
                self._forget(plan.ended)
        return plans

    def repeat(self, now: float, worker: int = 0) -> StepPlan:
        """As `Scheduler.repeat`."""
        plan = self.core.repeat(now, worker)
        self._guard(self._note_plans, now, [plan], worker)
        return plan

    def revoke(self, worker: int = 0) -> None:
        """As `Scheduler.revoke`."""
        self.core.revoke(worker)
        self._note(Revoked(self._clock(), worker))

    def update(self, result: StepResult, now: float | None = None) -> StepOutcome:
        """As `Scheduler.update`."""
        expected, fast = self._expected.pop(result.step, None), self._fast.pop(result.step, None)
        outcome = self.core.update(result, now)
        self._guard(self._note_result, result, now, outcome, expected, fast)
        if outcome.ended:
            self._forget(outcome.ended)
        return outcome

    def warm_up(self, *, on: bool) -> None:
        """As `Scheduler.warm_up`."""
        self.core.warm_up(on=on)
        self._note(WarmedUp(self._clock(), on))

    def put_drafts(self, drafts: dict[str, list[int]]) -> None:
        """As `Scheduler.put_drafts`."""
        self.core.put_drafts(drafts)
        runs = drafts.values()
        flat = [token for run in runs for token in run]
        self._note(Drafted(self._clock(), list(drafts), ints([len(run) for run in runs]), tokens(flat)))

    def fail_step(self, step: int, why: str) -> StepOutcome:
        """As `Scheduler.fail_step`."""
        self._expected.pop(step, None)
        self._fast.pop(step, None)
        outcome = self.core.fail_step(step, why)
        self._note(Failed(self._clock(), step, why, endings(outcome.ended)))
        self._forget(outcome.ended)
        return outcome

    def reset_sequences_of_lost_worker(self, worker: int | None = None) -> None:
        """As `Scheduler.reset_sequences_of_lost_worker`."""
        if worker is None:
            self._expected.clear()
            self._fast.clear()
        self.core.reset_sequences_of_lost_worker(worker)
        self._note(WorkerLost(self._clock(), worker))

    def take_worker_back(self, worker: int) -> None:
        """As `Scheduler.take_worker_back`."""
        self.core.take_worker_back(worker)
        self._note(WorkerBack(self._clock(), worker))

    def put_worker(self, number: int, pool: PoolSize, limits: CoreLimits, rename: HashRename | None = None) -> None:
        """As `live_change.put_worker` of the core."""
        live_change.put_worker(self.core, number, pool, limits, rename)
        self._note(WorkerPut(self._clock(), number, asdict(pool), asdict(limits)))

    def drain_worker(self, worker: int) -> None:
        """As `Scheduler.drain_worker`."""
        self.core.drain_worker(worker)
        self._note(WorkerDrained(self._clock(), worker, is_moved=False))

    def send_back(self, worker: int, *, keep_movable: bool = False) -> None:
        """As `Scheduler.send_back`."""
        self.core.send_back(worker, keep_movable=keep_movable)
        self._note(WorkerDrained(self._clock(), worker, is_moved=True, keep_movable=keep_movable))

    def hold(self, name: str) -> None:
        """As `Scheduler.hold`."""
        self.core.hold(name)
        self._note(GroupHeld(self._clock(), name, on=True))

    def let_go(self, name: str) -> None:
        """As `Scheduler.let_go`."""
        self.core.let_go(name)
        self._note(GroupHeld(self._clock(), name, on=False))

    def hand_over(self, name: str, worker: int, image: str) -> bool:
        """As `Scheduler.hand_over`."""
        done = self.core.hand_over(name, worker, image)
        self._note(GroupMoved(self._clock(), name, worker, image, done))
        return done

    def remove_worker(self, worker: int) -> None:
        """As `Scheduler.remove_worker`."""
        self.core.remove_worker(worker)
        self._note(WorkerGone(self._clock(), worker))

    def reset_prefix_cache(self, *, preempt_running: bool = False) -> bool:
        """As `Scheduler.reset_prefix_cache`."""
        done = self.core.reset_prefix_cache(preempt_running=preempt_running)
        self._note(PrefixesReset(self._clock(), preempt_running, done))
        return done

    def observe_costs(self, costs: Costs, worker: int | None = None) -> None:
        """As `Scheduler.observe_costs`."""
        self.core.observe_costs(costs, worker)
        self._note(CostsSeen(self._clock(), asdict(costs), worker))

    def reconfigure(self, spec: PolicySpec, limits: CoreLimits) -> None:
        """As `live_change.reconfigure` of the core."""
        live_change.reconfigure(self.core, spec, limits)
        self._note(Changed(self._clock(), asdict(spec), asdict(limits)))

    # --- inside ------------------------------------------------------------------------------------------------------

    def _begin(self) -> None:
        self._guard(self._take_snapshot)

    def _take_snapshot(self) -> None:
        taken = snapshot.take(self.core, self._records)
        about = {**self._about, "spec": asdict(self.core.spec), "limits": asdict(self.core.limits)}
        self._buffer.begin(self.core.step + 1, about, taken, goes_on=self._has_begun)
        self._has_begun = True
        self._shape = None
        self._expected.clear()

    def _note(self, event: Event) -> None:
        """Record an event. Events before the first plan are covered by its snapshot."""
        if self._has_begun:
            self._guard(self._buffer.add, event)

    def _note_plans(self, now: float, plans: list[StepPlan], worker: int | None) -> None:
        decisions, num_bytes = self._freezer.of_all(plans), 200
        for plan, decision in zip(plans, decisions, strict=True):
            shape = decision.shape
            num_bytes += decision.num_bytes + (0 if shape is self._shape else shape.num_bytes)
            self._shape = shape
            self._expected[plan.step] = shape.sampling
            if plan.fast is not None:
                self._fast[plan.step] = plan.fast
        self._buffer.add(PlanEvent(now, decisions, num_bytes=num_bytes, worker=worker), num_steps=len(plans))

    def _note_result(
        self,
        result: StepResult,
        now: float | None,
        outcome: StepOutcome,
        expected: tuple[str, ...] | None,
        fast: FastShare | None,
    ) -> None:
        record = _plain_record(result, fast, expected)
        record = record or ResultRecord.of(result, _by_name(result, fast), expected)
        ended = endings(outcome.ended) if outcome.ended else []
        self._buffer.add(Returned(self._clock(), now, record, ended, list(outcome.dropped)))

    def _forget(self, ended: list[EndedSequence]) -> None:
        for sequence in ended:
            if sequence.request_done:
                self._records.pop(sequence.request_id, None)

    def _guard(self, write: Callable[..., None], *args: Any) -> None:
        if self._is_off:
            return
        try:
            write(*args)
        except Exception:
            self._is_off = True
            log.exception("recording failed and is off from here on; scheduling goes on")


AnyCore = Scheduler | RecordingCore
"""A core, recorded or not."""


def failure(error: Exception) -> str:
    """Text by which a failed `schedule` is compared."""
    return f"{type(error).__name__}: {error}"


def _plain_record(result: StepResult, fast: FastShare | None, expected: tuple[str, ...] | None) -> ResultRecord | None:
    """Record of a result with exactly one token for each row of a fast decode plan; None for others."""
    column = result.column
    if column is None or fast is None or expected is None or len(fast.rows) != len(expected):
        return None
    others = (result.tokens, result.failed, result.children, result.candidates, result.mask_s)
    if any(others) or min(column.tolist()) < 0:
        return None
    return ResultRecord(result.step, None, b"", column_of(column), result.duration_s, result.queued_s)


def _by_name(result: StepResult, fast: FastShare | None) -> dict[str, list[int]]:
    """Tokens of a result by name, including those given as a column."""
    if result.column is None or fast is None:
        return result.tokens
    column = np.asarray(result.column).tolist()
    found = {name: [token] for name, token in zip(fast.names(), column, strict=True) if token >= 0}
    return {**found, **result.tokens}
