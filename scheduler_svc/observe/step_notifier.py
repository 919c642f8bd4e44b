"""Freezes each step into one `StepRecord` and passes it to the observers."""

import logging
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from scheduler_svc.core.plan import StepOutcome, StepPlan, StepResult
from scheduler_svc.observe.plan_record import PlanFreezer
from scheduler_svc.observe.step_observer import StepObserver
from scheduler_svc.observe.step_record import NO_TOKENS, StepOrigin, StepRecord, Tables
from scheduler_svc.worker_values import SampledColumns, WorkerResult
from scheduler_svc.workers.row_failures import NOT_FINITE
from svc_common.clock import monotonic_ns
from svc_common.reasons import known_reason

log = logging.getLogger(__name__)

WORKER_LOST, ROWS_NOT_FINITE = "WORKER_LOST", "NOT_FINITE"


class StepNotifier:
    """Owner of the open records. `policy`: name of the policy that makes the plans.

    `freezer`: shared with a recorder, so that a plan is frozen once. `clock_ns`: time of results, on the clock
    of `StepOrigin`. `is_strict`: an observer's error is raised, not logged.
    """

    def __init__(
        self,
        observers: Sequence[StepObserver],
        *,
        policy: str = "",
        freezer: PlanFreezer | None = None,
        clock_ns: Callable[[], int] = monotonic_ns,
        is_strict: bool = False,
    ) -> None:
        self.policy = policy
        self._freezer = freezer or PlanFreezer()
        self._clock_ns = clock_ns
        self._is_strict = is_strict
        self._on_plan = _overridden(observers, "on_plan")
        self._on_announced = _overridden(observers, "on_announced")
        self._on_result = _overridden(observers, "on_result")
        self._on_end = _overridden(observers, "on_end")
        self._makes_records = bool(self._on_announced or self._on_end)
        self._open: dict[int, StepRecord] = {}
        self._left: list[str] = []
        self._last_sampled = NO_TOKENS

    def planned(self, plan: StepPlan, origin: StepOrigin, whole: Tables | None = None) -> None:
        """Open a record if the plan has work. `whole`: the current block tables, required if it moves blocks."""
        if self._makes_records and plan.is_empty:
            self._left.extend(plan.left)
        elif self._makes_records:
            frozen = self._freezer.of(plan)
            left = [*self._left, *plan.left] if self._left else frozen.left
            self._open[plan.step] = StepRecord(frozen, origin, self.policy, left, whole)
            self._left = []
        self._notify(self._on_plan, plan, origin)

    def announced(self, plan: StepPlan) -> None:
        """Note that the requests of the plan are updated."""
        record = self._open.get(plan.step)
        if record is not None:
            self._notify(self._on_announced, record)

    def returned(self, plan: StepPlan, result: WorkerResult, outcome: StepOutcome) -> None:
        """Close a step with its result, which the core has processed."""
        self._notify(self._on_result, plan, result, outcome)
        record = self._open.get(plan.step)
        if record is None:
            return
        record.sampled = self._sampled(result, outcome)
        record.computed_tokens = result.num_computed_tokens
        record.duration_ns, record.timings = result.duration_ns, result.timings
        record.failure, record.failed = _failure(result), tuple(result.result.failed.items())
        self._close(record, result.error.message if result.error else "")

    def lost_worker(self, names: Iterable[str], steps: Iterable[int] | None = None, why: str = "") -> None:
        """Close steps (None: all open ones) without a result, and note that the sequences were removed from the worker."""
        for step in list(self._open) if steps is None else steps:
            record = self._open.get(step)
            if record is not None and not record.is_closed:
                record.failure, record.why = WORKER_LOST, why
                self._close(record, "the worker was lost")
        self._left.extend(names)

    # --- inside -----------------------------------------------------------------------------------------------------

    def _close(self, record: StepRecord, error: str) -> None:
        """Close a record. Steps end in step order, although the workers of several ranks answer in any order."""
        record.error, record.is_closed, record.closed_ns = error, True, self._clock_ns()
        for step, oldest in list(self._open.items()):
            if not oldest.is_closed:
                break
            del self._open[step]
            self._notify(self._on_end, oldest)

    def _notify(self, methods: list[Callable[..., None]], *args: Any) -> None:
        for method in methods:
            try:
                method(*args)
            except Exception:
                if self._is_strict:
                    raise
                log.exception("%s failed; the step goes on", getattr(method, "__qualname__", method))

    def _sampled(self, result: WorkerResult, outcome: StepOutcome) -> SampledColumns:
        """The sampled tokens; the counts per sequence are shared with the previous step if they are equal."""
        sampled = result.plain or SampledColumns.of(_tokens(result.result, outcome))
        last = self._last_sampled
        if sampled.names is not last.names and (sampled.names, sampled.counts) == (last.names, last.counts):
            sampled = SampledColumns(last.names, last.counts, sampled.token_ids)
        self._last_sampled = sampled
        return sampled


def _overridden(observers: Sequence[StepObserver], name: str) -> list[Callable[..., None]]:
    """The observers' methods of that name, without those that do nothing."""
    nothing = getattr(StepObserver, name)
    return [getattr(o, name) for o in observers if getattr(type(o), name) is not nothing]


def _tokens(result: StepResult, outcome: StepOutcome) -> dict[str, list[int]]:
    """Tokens by sequence name. Those of children and beam candidates are where the core put them."""
    if not (result.children or result.candidates):
        return result.tokens
    runs = {run.name: run.token_ids for run in outcome.runs}
    return {**runs, **result.tokens}


def _failure(result: WorkerResult) -> str:
    if result.error is not None:
        return known_reason(result.error.reason)
    return ROWS_NOT_FINITE if NOT_FINITE in result.result.failed.values() else ""
