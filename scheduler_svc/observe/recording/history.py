"""Steps of each request in a run of a core: admissions, first token, end."""

from collections.abc import Iterable
from dataclasses import dataclass, field

from scheduler_svc.core.plan import EndedSequence, StepOutcome, StepPlan
from scheduler_svc.core.reasons import WAITING_QUEUES, Reason
from scheduler_svc.core.request import Request, SequenceStatus
from scheduler_svc.core.scheduler import Scheduler

_ENDS = {
    SequenceStatus.FINISHED_STOPPED: "stop",
    SequenceStatus.FINISHED_LENGTH_CAPPED: "length",
    SequenceStatus.FINISHED_ABORTED: "abort",
    SequenceStatus.FINISHED_IGNORED: "ignored",
}


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


class ReplayHistory:
    """Steps of all requests in a run. If an id arrives again, the new request replaces the old one."""

    def __init__(self) -> None:
        self.requests: dict[str, RequestSteps] = {}
        self._without_token: dict[str, None] = {}

    def begin(self, core: Scheduler) -> None:
        """Start or continue the run with this core."""
        for request in core.state.requests.values():
            known = self.requests.get(request.request_id)
            if known is None or known.end is not None:
                self.arrived(request)

    def arrived(self, request: Request) -> None:
        """Add a request."""
        self.requests[request.request_id] = RequestSteps()
        if sum(s.num_output_tokens for s in request.sequences) == len(request.committed):
            self._without_token[request.request_id] = None

    def planned(self, plan: StepPlan) -> None:
        """Record a plan."""
        started: dict[tuple[str, int], None] = {}
        for event in plan.events:
            if event.reason is Reason.RUNNING:
                started[event.request_id, event.sample] = None
            elif event.queue in WAITING_QUEUES and not event.of_queue:
                started.pop((event.request_id, event.sample), None)
        for request_id in dict.fromkeys(request_id for request_id, _ in started):
            if request_id in self.requests:
                self.requests[request_id].admitted_steps.append(plan.step)
        self.ended(plan.ended, plan.step)

    def got(self, outcome: StepOutcome, step: int) -> None:
        """Record the outcome of a step's result."""
        if self._without_token:
            for run in outcome.runs:
                if run.request_id in self._without_token and run.token_ids:
                    del self._without_token[run.request_id]
                    self.requests[run.request_id].first_token_step = step
        self.ended(outcome.ended, step)

    def ended(self, ended: Iterable[EndedSequence], step: int) -> None:
        """Record sequences that ended in, or after, that step."""
        for sequence in ended:
            steps = self.requests.get(sequence.request_id)
            if steps is not None and sequence.request_done:
                self._without_token.pop(sequence.request_id, None)
                steps.end_step = step
                steps.end = end_of(sequence)


def end_of(ended: EndedSequence) -> str:
    """How the sequence ended, in the words of `RequestSteps.end`."""
    failed = ended.error is not None and ended.status is SequenceStatus.FINISHED_ABORTED
    return "failed" if failed else _ENDS[ended.status]
