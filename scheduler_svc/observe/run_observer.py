"""Observers of a core that runs outside the services, in a replay or a simulation."""

from collections.abc import Callable, Sequence
from typing import Literal

from protos.common.v1 import common_pb2
from protos.worker.v1 import worker_pb2
from scheduler_svc.core.plan import EndedSequence, StepOutcome, StepPlan, StepResult
from scheduler_svc.core.request import Request
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.observe.plan_record import PlanFreezer
from scheduler_svc.observe.step_notifier import StepNotifier
from scheduler_svc.observe.step_observer import StepObserver
from scheduler_svc.observe.step_record import StepOrigin
from scheduler_svc.worker_values import WorkerResult
from svc_common.clock import NS_PER_S
from svc_common.errors import QuireError

EndCause = Literal["abort", "deadline", "stop_string"]
NO_RESULT = "the recording ends before its result"


class RunObserver(StepObserver):
    """A `StepObserver` of a replay or simulation. Called by `RunNotifier`; an error that it raises ends the run."""

    def on_start(self, core: Scheduler, clock: Callable[[], float]) -> None:
        """The run starts, or continues with another core. `clock`: seconds of the run's own time, which `StepOrigin` has too."""

    def on_request(self, request: Request, refusal: QuireError | None) -> None:
        """A request was added, or refused."""

    def on_ended(self, ended: list[EndedSequence], cause: EndCause) -> None:
        """Sequences ended outside a step. With a stop string, only the tokens that they have left count."""

    def on_worker_lost(self, worker: int | None) -> None:
        """The worker's memory was lost, and plans in flight have no results; `worker`: only that one's."""


class RunNotifier(StepNotifier):
    """Passes a run to its observers. `clock`: see `RunObserver.on_start`."""

    def __init__(self, observers: Sequence[RunObserver], clock: Callable[[], float]) -> None:
        super().__init__(observers, clock_ns=lambda: round(clock() * NS_PER_S), is_strict=True)
        self._observers = observers
        self._clock = clock
        self._has_tables = False

    def start(self, core: Scheduler, freezer: PlanFreezer | None = None) -> None:
        """Start or continue with this core; steps of an earlier one get no result. `freezer`: see `StepNotifier`."""
        self.close()
        self._freezer, self._has_tables = freezer or PlanFreezer(), False
        for observer in self._observers:
            observer.on_start(core, self._clock)

    def close(self) -> None:
        """Close the steps that have no result at the end of the run."""
        for record in list(self._open.values()):
            if not record.is_closed:
                self._close(record, NO_RESULT)

    def requested(self, request: Request, refusal: QuireError | None) -> None:
        """A request was added, or refused."""
        for observer in self._observers:
            observer.on_request(request, refusal)

    def ended(self, ended: list[EndedSequence], cause: EndCause) -> None:
        """Sequences, if any, ended outside a step."""
        for observer in self._observers if ended else ():
            observer.on_ended(ended, cause)

    def scheduled(self, core: Scheduler, plan: StepPlan) -> None:
        """The core made a plan."""
        if not self._observers:
            return
        tables = None
        if self._makes_records and not plan.is_empty:
            self.policy = core.policy
            if not self._has_tables or plan.swap_in or plan.swap_out or plan.copy:
                self._has_tables, tables = True, core.block_tables()
        worker = core.worker_of(plan.lane)
        rank = worker if core.num_workers > 1 else None
        self.planned(plan, StepOrigin(planned_ns=self._clock_ns(), worker=worker, rank=rank), tables)
        self.announced(plan)

    def answered(self, plan: StepPlan, result: StepResult, error: str | None, outcome: StepOutcome) -> None:
        """The core has processed a plan's result, or its failure: `error`."""
        if not self._observers:
            return
        answer = WorkerResult(
            step_id=0,
            result=result,
            extras={},
            num_computed_tokens=plan.num_tokens if error is None else 0,
            duration_ns=round(result.duration_s * NS_PER_S),
            timings=worker_pb2.StepTimings(queued_ns=round(result.queued_s * NS_PER_S)),
            error=None if error is None else common_pb2.ErrorStatus(message=error),
        )
        self.returned(plan, answer, outcome)

    def lost(self, worker: int | None) -> None:
        """That worker, or all, were lost."""
        self.lost_worker((), [step for step, record in self._open.items() if worker in (None, record.origin.worker)])
        self._has_tables = False
        for observer in self._observers:
            observer.on_worker_lost(worker)
