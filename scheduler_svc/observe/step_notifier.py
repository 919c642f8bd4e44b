"""Freezes each step into one `StepRecord` and passes it to the observers."""

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from scheduler_svc.core.plan import StepOutcome, StepPlan
from scheduler_svc.observe.step_observer import StepObserver
from scheduler_svc.observe.step_record import Scheduled, StepRecord, TableChange, Tables
from scheduler_svc.workers.result import SampledColumns, WorkerResult
from scheduler_svc.workers.row_failures import NOT_FINITE
from svc_common import wire_arrays
from svc_common.clock import monotonic_ns
from svc_common.reasons import known_reason

log = logging.getLogger(__name__)

WORKER_LOST, ROWS_NOT_FINITE = "WORKER_LOST", "NOT_FINITE"


@dataclass(frozen=True, slots=True)
class StepOrigin:
    """How a plan was made, and where it is sent; fields as in `StepRecord`. `rank`: the dp rank, if each has its own blocks."""

    planned_ns: int = 0
    schedule_ns: int = 0
    epoch: int = 0
    step_id: int = 0
    worker: int = 0
    worker_id: str = ""
    rank: int | None = None


class StepNotifier:
    """Owner of the open records. `policy`: name of the policy that makes the plans.

    Without observers, nothing is recorded.
    """

    def __init__(self, observers: Sequence[StepObserver], policy: str = "") -> None:
        self.policy = policy
        self._is_on = bool(observers)
        self._on_plan = _overridden(observers, "on_plan")
        self._on_announced = _overridden(observers, "on_announced")
        self._on_result = _overridden(observers, "on_result")
        self._on_end = _overridden(observers, "on_end")
        self._open: dict[int, StepRecord] = {}
        self._left: list[str] = []
        self._last: StepRecord | None = None
        self._course: tuple[object, int] | None = None
        self._last_sampled: tuple[tuple[str, ...], bytes] = ((), b"")

    def planned(self, plan: StepPlan, origin: StepOrigin, whole: Tables | None = None) -> None:
        """Open a record. `whole`: the current block tables, required if the plan moves blocks."""
        if not self._is_on:
            return
        self._left.extend(plan.left)
        record = self._record(plan, origin, whole)
        if not plan.is_empty:
            self._left = []
            self._open[plan.step] = self._last = record
        _tell(self._on_plan, plan, record)

    def announced(self, plan: StepPlan) -> None:
        """Note that the requests know of the plan."""
        record = self._open.get(plan.step)
        if record is not None:
            _tell(self._on_announced, record)

    def returned(self, plan: StepPlan, result: WorkerResult, outcome: StepOutcome) -> None:
        """Close a step with its result, which the core has processed."""
        record = self._open.get(plan.step)
        if record is None:
            return
        _tell(self._on_result, plan, result, outcome)
        runs = {run.name: run.token_ids for run in outcome.runs} if result.branches else {}
        self._put_sampled(record, result, runs)
        record.computed_tokens = result.num_computed_tokens
        record.duration_ns, record.timings = result.duration_ns, result.timings
        record.failure, record.failed = _failure(result), tuple(result.result.failed.items())
        self._close(record, result.error.message if result.error else "")

    def lost_worker(self, names: Iterable[str], steps: Iterable[int] | None = None, why: str = "") -> None:
        """Close steps (None: all open ones) without a result, and note that the sequences were removed from the worker."""
        for step in list(self._open) if steps is None else steps:
            if step in self._open:
                self._open[step].failure, self._open[step].why = WORKER_LOST, why
                self._close(self._open[step], "the worker was lost")
        self._left.extend(names)

    # --- inside -----------------------------------------------------------------------------------------------------

    def _close(self, record: StepRecord, error: str) -> None:
        """Close a record. Steps end in step order, although the workers of several ranks answer in any order."""
        record.error, record.is_closed, record.closed_ns = error, True, monotonic_ns()
        while self._open and (oldest := next(iter(self._open.values()))).is_closed:
            del self._open[oldest.step]
            _tell(self._on_end, oldest)

    def _record(self, plan: StepPlan, origin: StepOrigin, whole: Tables | None) -> StepRecord:
        return StepRecord(
            step=plan.step,
            epoch=origin.epoch,
            lane=plan.lane,
            policy=self.policy,
            scheduled=self._scheduled(plan),
            swap_in=tuple(plan.swap_in),
            swap_out=tuple(plan.swap_out),
            copy=tuple(plan.copy),
            preempted=tuple(plan.preempted),
            queues=(plan.num_waiting, plan.num_running, plan.num_swapped),
            free=(plan.free_gpu, plan.free_cpu),
            change=self._change(plan, whole, origin.rank),
            planned_ns=origin.planned_ns,
            schedule_ns=origin.schedule_ns,
            step_id=origin.step_id,
            worker=origin.worker,
            worker_id=origin.worker_id,
        )

    def _put_sampled(self, record: StepRecord, result: WorkerResult, runs: Mapping[str, list[int]]) -> None:
        """Put the sampled tokens into the record. `runs`: the core's outcome, for sequences that branched."""
        sampled = SampledColumns.of({**runs, **result.result.tokens}) if runs else result.sampled
        who = sampled.names, sampled.counts
        if who != self._last_sampled:
            self._last_sampled = who
        record.sampled_names, record.sampled_counts = self._last_sampled
        record.sampled_ids = sampled.token_ids

    def _scheduled(self, plan: StepPlan) -> Scheduled:
        last, course = self._last.scheduled if self._last else None, plan.course
        if last is not None and course is not None and course == self._course:
            return last
        self._course = course
        entries = plan.scheduled
        made = Scheduled(
            names=tuple([e.name for e in entries]),
            ids=tuple([e.request_id for e in entries]),
            tokens=wire_arrays.pack([e.num_tokens for e in entries]),
            lead=wire_arrays.pack([e.computed_before - plan.step for e in entries]),
            prefill=bytes([e.is_prefill for e in entries]),
        )
        if last is None or made.names != last.names:
            return made
        if (made.tokens, made.lead, made.prefill) == (last.tokens, last.lead, last.prefill):
            return last
        return Scheduled(last.names, last.ids, made.tokens, made.lead, made.prefill)

    def _change(self, plan: StepPlan, whole: Tables | None, rank: int | None) -> TableChange:
        if whole is not None:
            return TableChange(whole=whole)
        grown = plan.grown
        return TableChange(
            left=tuple(self._left),
            fresh=tuple((e.name, wire_arrays.pack(e.new_block_ids)) for e in grown if e.fresh),
            appended=tuple((e.name, wire_arrays.pack(e.new_block_ids)) for e in grown if not e.fresh),
            rank=rank,
        )


def _overridden(observers: Sequence[StepObserver], name: str) -> list[Callable[..., None]]:
    """The observers' methods of that name, without those that do nothing."""
    nothing = getattr(StepObserver, name)
    return [getattr(o, name) for o in observers if getattr(type(o), name) is not nothing]


def _tell(methods: list[Callable[..., None]], *args: Any) -> None:
    for method in methods:
        try:
            method(*args)
        except Exception:
            log.exception("%s failed; the step goes on", getattr(method, "__qualname__", method))


def _failure(result: WorkerResult) -> str:
    if result.error is not None:
        return known_reason(result.error.reason)
    return ROWS_NOT_FINITE if NOT_FINITE in result.result.failed.values() else ""
