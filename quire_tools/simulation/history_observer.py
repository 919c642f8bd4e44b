"""The observer that makes the `SimulationHistory` of a run."""

from collections.abc import Callable, Iterable

from quire_tools.simulation.cost_model import StepShape, first_computed
from quire_tools.simulation.history import RequestHistory, SimulationHistory, end_of
from scheduler_svc.core.plan import EndedSequence, ScheduledSequence, StepOutcome, StepPlan
from scheduler_svc.core.request import Request
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.observe.run_observer import EndCause, RunObserver
from scheduler_svc.observe.step_record import StepOrigin
from scheduler_svc.worker_values import WorkerResult
from svc_common.clock import NS_PER_S
from svc_common.errors import QuireError


class HistoryObserver(RunObserver):
    """Owner of the history. `_reached`: how far each sequence was ever computed, to count recomputed tokens."""

    def __init__(self) -> None:
        self.history = SimulationHistory()
        self._reached: dict[str, int] = {}
        self._clock: Callable[[], float] = float
        self._block_size = 1

    def on_start(self, core: Scheduler, clock: Callable[[], float]) -> None:
        """Begin anew with the requests of this core."""
        self._clock, self._block_size = clock, core.limits.block_size
        self.history, self._reached = SimulationHistory(start_s=clock()), {}
        for request in core.state.requests.values():
            self.history.requests[request.request_id] = RequestHistory(
                request,
                request.arrival_time,
                first_scheduled_s=request.first_scheduled_time,
                first_token_s=request.first_token_time,
            )
            for sequence in request.sequences:
                self._reached[sequence.name] = sequence.num_computed_tokens

    def on_request(self, request: Request, refusal: QuireError | None) -> None:
        """Record an arrival."""
        key, now = request.request_id, self._clock()
        record = RequestHistory(request, now)
        if refusal is not None:
            record.end, record.end_s = "refused", now
            key = key if key not in self.history.requests else f"{key} at {now}"
        self.history.requests[key] = record

    def on_plan(self, plan: StepPlan, origin: StepOrigin) -> None:
        """Record a plan."""
        requests, now = self.history.requests, self._clock()
        for request_id, _ in plan.preempted:
            requests[request_id].num_preemptions += 1
        for request_id, num_cached in plan.lookups:
            requests[request_id].num_cached_tokens += num_cached
        for entry in plan.entries:
            record = requests[entry.request_id]
            if record.first_scheduled_s is None:
                record.first_scheduled_s = now
            if entry.fresh and record.admitted_steps[-1:] != [plan.step]:
                record.admitted_steps.append(plan.step)
            self._count(entry, record)
        if plan.fast is not None:
            members, reached = plan.fast.members, self._reached
            for row, before in zip(plan.fast.rows.tolist(), plan.fast.computed_before.tolist(), strict=True):
                group = members[row]
                requests[group.request.request_id].num_computed_tokens += 1
                reached[group.sequences[0].name] = before + 1
        self._end(plan.ended)

    def _count(self, entry: ScheduledSequence, record: RequestHistory) -> None:
        """Count computed tokens, and the recomputed ones among them."""
        end = entry.computed_before + entry.num_tokens
        start = first_computed(entry, self._block_size)
        record.num_computed_tokens += end - start
        end -= entry.num_drafts
        reached = self._reached.get(entry.name, 0)
        record.num_lost_tokens += max(0, min(reached, end) - start)
        self._reached[entry.name] = max(reached, end)

    def on_result(self, plan: StepPlan, result: WorkerResult, outcome: StepOutcome) -> None:
        """Record a result that was applied."""
        requests, now = self.history.requests, self._clock()
        self.history.steps.add(plan, StepShape.of(plan, self._block_size), result.duration_ns / NS_PER_S)
        if outcome.fast is not None:
            members = outcome.fast.members
            for row in outcome.fast.rows.tolist():
                requests[members[row].request.request_id].token_times_s.append(now)
        for run in outcome.entries:
            record = requests[run.request_id]
            if record.first_token_s is None:
                record.first_token_s, record.first_token_step = now, plan.step
            record.token_times_s.extend([now] * len(run.token_ids))
        self._end(outcome.ended, step=plan.step)

    def on_ended(self, ended: list[EndedSequence], cause: EndCause) -> None:
        """Record ended sequences."""
        self._end(ended, "deadline" if cause == "deadline" else None)

    def _end(self, ended: Iterable[EndedSequence], why: str | None = None, *, step: int | None = None) -> None:
        """Record ended sequences; `why` replaces "abort"."""
        for e in ended:
            record = self.history.requests[e.request_id]
            if record.end is None and e.request_done:
                record.end, record.end_s, record.end_step = why or end_of(e), self._clock(), step
