"""Observations from a replay, for what-if: arrivals and ends of requests, their tokens, and step durations."""

from collections.abc import Callable
from dataclasses import dataclass, field
from statistics import fmean

from quire_tools.simulation.cost_model import StepShape
from quire_tools.simulation.history import SimulationHistory
from quire_tools.simulation.history_observer import HistoryObserver
from scheduler_svc.core.plan import EndedSequence, StepOutcome, StepPlan
from scheduler_svc.core.request import Request
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.observe.run_observer import EndCause, RunObserver
from scheduler_svc.observe.step_record import StepOrigin
from scheduler_svc.worker_values import WorkerResult
from svc_common.errors import QuireError

_NATURAL_ENDS = ("stop", "length", "ignored")


@dataclass(slots=True)
class RecordedRequest:
    """A request in the recording. `is_whole`: all its output is in the recording, even if it was waiting at the start."""

    request: Request
    is_whole: bool
    left_at: float | None = None
    stop_string_at: int | None = None

    @property
    def outputs(self) -> dict[int, list[int]]:
        """Recorded output tokens by sequence index."""
        return {s.index: s.token_ids[s.num_prompt_tokens :] for s in self.request.sequences}


@dataclass(slots=True)
class _PlanInFlight:
    plan: StepPlan
    planned_at: float


@dataclass(slots=True)
class Observed(RunObserver):
    """One of `observers`, which collect everything together. `samples`: (shape, seconds at the worker); if that is
    unknown, seconds from planning, or from the end of the lane's previous step, to the result.

    Overlap hides the time that a loop without it loses between steps, so that is summed from parts.
    `overheads`: seconds from plan to result in which the worker neither ran the step nor had it queued;
    `gaps`: from a result to the next plan.
    """

    visits: dict[str, RecordedRequest] = field(default_factory=dict)
    samples: list[tuple[StepShape, float]] = field(default_factory=list)
    gaps: list[float] = field(default_factory=list)
    overheads: list[float] = field(default_factory=list)
    _times: HistoryObserver = field(default_factory=HistoryObserver)
    _in_flight: dict[int, _PlanInFlight] = field(default_factory=dict)
    _free_at: dict[int, float] = field(default_factory=dict)
    _result_at: float | None = None
    _core: Scheduler | None = None
    _clock: Callable[[], float] = float
    _block_size: int = 1

    @property
    def observers(self) -> tuple[RunObserver, ...]:
        """The observers to give to the replayer."""
        return self._times, self

    @property
    def history(self) -> SimulationHistory:
        """Times of all requests, on the recorded clock."""
        return self._times.history

    @property
    def in_flight(self) -> list[StepPlan]:
        """Plans in flight at the end."""
        return [sent.plan for sent in self._in_flight.values()]

    @property
    def overhead_s(self) -> float:
        """Mean time between the worker's end of a step and its start of the next, in a loop without overlap."""
        return sum(fmean(times) for times in (self.gaps, self.overheads) if times)

    def close(self) -> None:
        """Write fast decode rows back to their requests at the end of the replay."""
        if self._core is not None:
            self._core.state.fast_rows.sync_all()

    def is_censored(self, request_id: str) -> bool:
        """True if the request's natural length is unknown: it was cancelled, failed, or had not ended."""
        return self.history.requests[request_id].end not in _NATURAL_ENDS

    # --- as an observer -----------------------------------------------------------------------------------------------

    def on_start(self, core: Scheduler, clock: Callable[[], float]) -> None:
        """Begin anew with the requests of this core."""
        self._core, self._clock, self._block_size = core, clock, core.limits.block_size
        self.visits = {
            request.request_id: RecordedRequest(
                request, all(s.num_tokens == s.num_prompt_tokens for s in request.sequences)
            )
            for request in core.state.requests.values()
        }

    def on_request(self, request: Request, refusal: QuireError | None) -> None:
        """Add an accepted request."""
        if refusal is None:
            self.visits[request.request_id] = RecordedRequest(request, is_whole=True)

    def on_plan(self, plan: StepPlan, origin: StepOrigin) -> None:
        """Note when it was planned, and how long after a result."""
        at = self._clock()
        if not plan.is_empty:
            if self._result_at is not None:
                self.gaps.append(at - self._result_at)
            self._in_flight[plan.step] = _PlanInFlight(plan, at)
        self._result_at = None

    def on_result(self, plan: StepPlan, result: WorkerResult, outcome: StepOutcome) -> None:
        """Add the step's duration to the samples."""
        assert self._core is not None
        at, answer = self._clock(), result.result
        sent = self._in_flight.pop(plan.step, None)
        started = at if sent is None else max(sent.planned_at, self._free_at.get(plan.lane, sent.planned_at))
        self._free_at[plan.lane] = at
        if sent is not None and result.error is None:
            shape = StepShape.of(plan, self._block_size)
            self.samples.append((shape, answer.duration_s or at - started))
            if answer.duration_s:
                self.overheads.append(at - sent.planned_at - answer.queued_s - answer.duration_s)
        self._result_at = at if self._core.num_unfinished_groups else None

    def on_ended(self, ended: list[EndedSequence], cause: EndCause) -> None:
        """Note when a client cancelled, and where a stop string was found in a first sequence."""
        for sequence in ended:
            visit = self.visits[sequence.request_id]
            if cause == "abort":
                visit.left_at = self._clock()
            elif sequence.name.endswith("/0"):
                visit.stop_string_at = sequence.num_output_tokens

    def on_worker_lost(self, worker: int | None) -> None:
        """Forget the plans in flight."""
        assert self._core is not None
        worker_of = self._core.worker_of
        gone = [step for step, sent in self._in_flight.items() if worker in (None, worker_of(sent.plan.lane))]
        for step in gone:
            del self._in_flight[step]
        self._free_at.clear()
        self._result_at = None
