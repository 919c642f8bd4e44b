"""One accepted request as the service sees it: its submission, reader, timeline and output.

The core's view (queues, blocks, counters) is `core.request.Request`; `requests.book` keeps the tables of
these records.
"""

import enum
from dataclasses import dataclass, field
from typing import Protocol

from protos.engine.v1 import engine_pb2
from scheduler_svc.core.request import Request
from scheduler_svc.observe.request_trace import RequestTrace
from scheduler_svc.requests.choice_output import ChoiceOutputs
from scheduler_svc.requests.submission import Submission
from svc_common.observability.log_context import LogContext


class RequestStage(enum.Enum):
    """Where a request is: PENDING is not in the core (yet, or again), ENDED has its terminal message."""

    PENDING = enum.auto()
    IN_CORE = enum.auto()
    ENDED = enum.auto()


class OutputReader(Protocol):
    """The gateway stream that a request's output goes to."""

    def touch(self, delivery: "Delivery") -> None:
        """Signal that the delivery has new output."""

    def lose(self, delivery: "Delivery") -> None:
        """Signal that another reader took the request over."""


@dataclass(slots=True, eq=False)
class Delivery:
    """A request's connection to its reader. `sent_counts`: output tokens of each choice written so far; later ones are new.

    `ends_written`: choices with a written end.
    """

    reader: OutputReader
    handle: int
    live: "LiveRequest"
    sent_counts: list[int] = field(default_factory=list)
    ends_written: set[int] = field(default_factory=set)
    started_written: bool = False
    end_written: bool = False


@dataclass(slots=True)
class Timeline:
    """Times of the request's events, monotonic ns; None = not yet."""

    arrival_ns: int
    first_scheduled_ns: int | None = None
    first_token_ns: int | None = None
    preempted_since_ns: int | None = None
    preempted_ns: int = 0
    num_preemptions: int = 0
    num_migrations: int = 0


@dataclass(slots=True, eq=False)
class LiveRequest:
    """Owner of one request's output. `output` has the tokens to deliver, including committed ones.

    `core_id`: its id in the core. `request`: the core's record, once it entered the core. `num_losses`:
    workers lost while it was in their step, since its last token. `failure`: its error, if it failed.
    `account_at_end`: set by every end. `worker_id`: the worker that it was scheduled on last.
    `retain_until_ns`: end of the retention of a resumable request that ended.
    """

    core_id: str
    submission: Submission
    time: Timeline
    output: ChoiceOutputs
    place: RequestStage = RequestStage.PENDING
    request: Request | None = None
    delivery: Delivery | None = None
    cached_prompt_tokens: int = 0
    num_accepted_drafts: int = 0
    num_rejected_drafts: int = 0
    num_losses: int = 0
    failure: engine_pb2.Failed | None = None
    account_at_end: engine_pb2.RequestAccount | None = None
    retain_until_ns: int = 0
    trace: RequestTrace | None = field(default=None, repr=False)
    worker_id: str = ""

    @property
    def is_waiting(self) -> bool:
        """True if accepted and never scheduled; these are what the bounded queue counts."""
        return not self.is_over and self.time.first_scheduled_ns is None

    @property
    def is_over(self) -> bool:
        """True once the request ended."""
        return self.account_at_end is not None

    @property
    def log_context(self) -> LogContext:
        """Fields for log lines about the request."""
        submission = self.submission
        trace = submission.sampling.trace
        traceparent = "" if trace is None else trace.traceparent
        return LogContext.of_message(
            request_id=submission.request_id, tenant=submission.tenant, traceparent=traceparent
        )

    def name(self, choice: int) -> str:
        """Name of the core's sequence behind a choice; for choices that are not ranked."""
        return f"{self.core_id}/{choice}"

    def touch(self) -> None:
        """Signal the reader, if any, that there is new output."""
        if self.delivery is not None:
            self.delivery.reader.touch(self.delivery)

    def on_scheduled(self, now_ns: int) -> bool:
        """Update the timeline when a plan schedules the request first or again after a preemption or loss; True the first time."""
        if self.time.preempted_since_ns is not None:
            self.time.preempted_ns += now_ns - self.time.preempted_since_ns
            self.time.preempted_since_ns = None
        if self.time.first_scheduled_ns is not None:
            return False
        self.time.first_scheduled_ns = now_ns
        return True

    def message(self, now_ns: int) -> engine_pb2.Submit:
        """The Submit message of a resumable request, with its age and remaining time as of `now_ns`."""
        message = engine_pb2.Submit()
        assert self.submission.message is not None
        message.CopyFrom(self.submission.message)
        message.arrival_age_ns = max(0, now_ns - self.time.arrival_ns)
        deadline_ns = self.submission.deadline_ns
        message.remaining_ns = 0 if deadline_ns is None else max(1, deadline_ns - now_ns)
        return message

    def account(self, now_ns: int) -> engine_pb2.RequestAccount:
        """Token counts and times used until `now_ns`."""
        time = self.time
        scheduled = time.first_scheduled_ns or now_ns
        first_token = time.first_token_ns or now_ns
        waiting_again = now_ns - time.preempted_since_ns if time.preempted_since_ns is not None else 0
        return engine_pb2.RequestAccount(
            prompt_tokens=len(self.submission.prompt),
            cached_prompt_tokens=self.cached_prompt_tokens,
            completion_tokens=self.output.num_tokens,
            queue_ns=scheduled - time.arrival_ns,
            prefill_ns=first_token - scheduled,
            decode_ns=now_ns - first_token,
            preempted_ns=time.preempted_ns + waiting_again,
            num_preemptions=time.num_preemptions,
            num_migrations=time.num_migrations,
            worker_id=self.worker_id,
            accepted_draft_tokens=self.num_accepted_drafts,
            rejected_draft_tokens=self.num_rejected_drafts,
        )
