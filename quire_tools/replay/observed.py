"""Observations from a replay, for what-if: arrivals and ends of requests, their tokens, and step durations."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from statistics import fmean

from quire_tools.simulation.cost_model import StepShape
from quire_tools.simulation.history import SimulationHistory
from quire_tools.simulation.link import SimulatedAnswer
from quire_tools.simulation.record import Recorder
from scheduler_svc.core.plan import EndedSequence, StepOutcome, StepPlan, StepResult
from scheduler_svc.core.request import Request
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.observe.recording.events import AbortEvent, Failed, Returned, StoppedAt

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
class Observed:
    """A `Watcher` that collects everything. `samples`: (shape, seconds at the worker); if that is unknown,
    seconds from planning, or from the end of the lane's previous step, to the result.

    Overlap hides the time that a loop without it loses between steps, so that is summed from parts.
    `overheads`: seconds from plan to result in which the worker neither ran the step nor had it queued;
    `gaps`: from a result to the next plan.
    """

    visits: dict[str, RecordedRequest] = field(default_factory=dict)
    samples: list[tuple[StepShape, float]] = field(default_factory=list)
    gaps: list[float] = field(default_factory=list)
    overheads: list[float] = field(default_factory=list)
    _recorder: Recorder | None = None
    _block_size: int = 1
    _in_flight: dict[int, _PlanInFlight] = field(default_factory=dict)
    _free_at: dict[int, float] = field(default_factory=dict)
    _result_at: float | None = None
    _core: Scheduler | None = None

    @property
    def history(self) -> SimulationHistory:
        """Times of all requests, on the recorded clock."""
        assert self._recorder is not None
        return self._recorder.history

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

    # --- as a watcher ------------------------------------------------------------------------------------------------

    def began(self, core: Scheduler) -> None:
        """See `Watcher`."""
        self._core = core
        self._block_size = core.state.limits.block_size
        self._recorder = Recorder(core.state.requests.values(), 0.0, self._block_size)
        self.visits = {
            request.request_id: RecordedRequest(
                request, all(s.num_tokens == s.num_prompt_tokens for s in request.sequences)
            )
            for request in core.state.requests.values()
        }

    def arrived(self, request: Request, at: float) -> None:
        """See `Watcher`."""
        assert self._recorder is not None
        self._recorder.arrived(at, request, is_refused=False)
        self.visits[request.request_id] = RecordedRequest(request, is_whole=True)

    def planned(self, plan: StepPlan, at: float) -> None:
        """See `Watcher`."""
        assert self._recorder is not None
        self._recorder.planned(at, plan)
        self._recorder.ended(at, plan.ended)
        if not plan.is_empty:
            if self._result_at is not None:
                self.gaps.append(at - self._result_at)
            self._in_flight[plan.step] = _PlanInFlight(plan, at)
        self._result_at = None

    def returned(self, event: Returned | Failed, outcome: StepOutcome) -> None:
        """See `Watcher`."""
        assert self._recorder is not None and self._core is not None
        step = event.result.step if isinstance(event, Returned) else event.step
        at = event.now if isinstance(event, Returned) and event.now is not None else event.at
        sent = self._in_flight.pop(step, None)
        plan = StepPlan(step, 0) if sent is None else sent.plan
        started = at if sent is None else max(sent.planned_at, self._free_at.get(plan.lane, sent.planned_at))
        self._free_at[plan.lane] = at
        shape = StepShape.of(plan, self._block_size)
        error = event.why if isinstance(event, Failed) else None
        self._recorder.answered(
            at, SimulatedAnswer(plan, StepResult(step), error, shape, started, at - started), outcome
        )
        if sent is not None and isinstance(event, Returned):
            self.samples.append((shape, event.result.duration_s or at - started))
            if event.result.duration_s:
                self.overheads.append(at - sent.planned_at - event.result.queued_s - event.result.duration_s)
        self._result_at = at if self._core.num_unfinished_groups else None

    def ended(self, event: AbortEvent | StoppedAt, ended: list[EndedSequence]) -> None:
        """See `Watcher`."""
        assert self._recorder is not None
        self._recorder.ended(event.at, ended)
        if isinstance(event, AbortEvent):
            self._left(event, ended)
        elif ended and event.name.endswith("/0"):
            self.visits[ended[0].request_id].stop_string_at = event.num_output_tokens

    def _left(self, event: AbortEvent, ended: Iterable[EndedSequence]) -> None:
        for sequence in ended:
            self.visits[sequence.request_id].left_at = event.at

    def lost_worker(self, lane: int | None) -> None:
        """See `Watcher`."""
        gone = [step for step, sent in self._in_flight.items() if lane is None or sent.plan.lane == lane]
        for step in gone:
            del self._in_flight[step]
        self._free_at.clear()
        self._result_at = None
