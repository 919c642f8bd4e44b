"""Steps of each request in a run of a core: admissions, first token, end."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from quire_tools.simulation.history import end_of
from scheduler_svc.core.plan import EndedSequence, StepOutcome, StepPlan
from scheduler_svc.core.reasons import WAITING_QUEUES, Reason
from scheduler_svc.core.request import Request
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.observe.run_observer import EndCause, RunObserver
from scheduler_svc.observe.step_record import StepOrigin
from scheduler_svc.worker_values import WorkerResult
from svc_common.errors import QuireError


@dataclass(slots=True)
class RequestSteps:
    """`admitted_steps`: steps in which any of its groups started or was swapped in.

    `end`: "stop", "length", "abort", "ignored" or "failed"; None = not yet.
    """

    admitted_steps: list[int] = field(default_factory=list)
    first_token_step: int | None = None
    end_step: int | None = None
    end: str | None = None

    def as_json(self) -> dict[str, object]:
        """The record in `quire replay --json`."""
        return {
            "admitted_steps": self.admitted_steps,
            "first_token_step": self.first_token_step,
            "end_step": self.end_step,
            "end": self.end,
        }


class RequestStepsObserver(RunObserver):
    """Steps of all requests in a run. If an id arrives again, the new request replaces the old one."""

    def __init__(self) -> None:
        self.requests: dict[str, RequestSteps] = {}
        self._without_token: dict[str, None] = {}
        self._last_step = 0

    def on_start(self, core: Scheduler, clock: Callable[[], float]) -> None:
        """Add the core's requests that are not known or had ended."""
        self._last_step = core.step
        for request in core.state.requests.values():
            known = self.requests.get(request.request_id)
            if known is None or known.end is not None:
                self._add(request)

    def on_request(self, request: Request, refusal: QuireError | None) -> None:
        """Add an accepted request."""
        if refusal is None:
            self._add(request)

    def _add(self, request: Request) -> None:
        self.requests[request.request_id] = RequestSteps()
        if sum(s.num_output_tokens for s in request.sequences) == len(request.committed):
            self._without_token[request.request_id] = None

    def on_plan(self, plan: StepPlan, origin: StepOrigin) -> None:
        """Record which requests it starts or ends."""
        self._last_step = plan.step
        started: dict[tuple[str, int], None] = {}
        for event in plan.events:
            if event.reason is Reason.RUNNING:
                started[event.request_id, event.sample] = None
            elif event.queue in WAITING_QUEUES and not event.of_queue:
                started.pop((event.request_id, event.sample), None)
        for request_id in dict.fromkeys(request_id for request_id, _ in started):
            if request_id in self.requests:
                self.requests[request_id].admitted_steps.append(plan.step)
        self._end(plan.ended, plan.step)

    def on_result(self, plan: StepPlan, result: WorkerResult, outcome: StepOutcome) -> None:
        """Record first tokens and ends."""
        if self._without_token:
            for run in outcome.runs:
                if run.request_id in self._without_token and run.token_ids:
                    del self._without_token[run.request_id]
                    self.requests[run.request_id].first_token_step = plan.step
        self._end(outcome.ended, plan.step)

    def on_ended(self, ended: list[EndedSequence], cause: EndCause) -> None:
        """Record ends after the last planned step."""
        self._end(ended, self._last_step)

    def _end(self, ended: Iterable[EndedSequence], step: int) -> None:
        for sequence in ended:
            steps = self.requests.get(sequence.request_id)
            if steps is not None and sequence.request_done:
                self._without_token.pop(sequence.request_id, None)
                steps.end_step = step
                steps.end = end_of(sequence)
