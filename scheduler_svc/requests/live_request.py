"""One accepted request as the service sees it: what was submitted, who reads it, how it went. What came out is in `choice_output`.

The core's view (queues, blocks, counters) is `core.request.Request`; tables of these records are in `request_book`.
"""

import enum
from dataclasses import dataclass, field
from typing import Protocol

from protos.engine.v1 import engine_pb2
from scheduler_svc.core.reasons import Event
from scheduler_svc.core.request import Request
from scheduler_svc.observe.request_trace import RequestTrace
from scheduler_svc.requests.choice_output import RequestOutput
from scheduler_svc.requests.submission import Submission
from svc_common.log_context import LogContext


class Place(enum.Enum):
    """Where a request stands: PENDING has not reached the core yet (or again), ENDED has its terminal message."""

    PENDING = enum.auto()
    IN_CORE = enum.auto()
    ENDED = enum.auto()


class Reader(Protocol):
    """The frontend that a request's output goes to."""

    def touch(self, outlet: "Outlet") -> None:
        """The outlet has something new."""

    def lose(self, outlet: "Outlet") -> None:
        """Another reader took the request over."""


@dataclass(slots=True, eq=False)
class Outlet:
    """A request's way to its reader. `cursors`: output tokens of each choice written so far; what lies beyond is new.

    `ends_written`: choices whose end was written.
    """

    reader: Reader
    handle: int
    live: "LiveRequest"
    cursors: list[int] = field(default_factory=list)
    ends_written: set[int] = field(default_factory=set)
    started_written: bool = False
    end_written: bool = False


@dataclass(slots=True)
class Timeline:
    """When what happened, monotonic ns; None = not yet."""

    arrival_ns: int
    first_scheduled_ns: int | None = None
    first_token_ns: int | None = None
    preempted_since_ns: int | None = None
    preempted_ns: int = 0
    num_preemptions: int = 0
    num_migrations: int = 0


@dataclass(slots=True, eq=False)
class LiveRequest:
    """Owner of one request's output. `output` has what is delivered, committed tokens included.

    `core_id`: its id in the core. `request`: what the core has of it, once it has been there. `num_losses`: workers lost with it in
    the step since its last token. `failure`: its end, where that is an error; `account_at_end`: set with whatever end.
    `worker_id`: where it was scheduled last. `last_event`: what the core decided of it last, of whichever sample.
    `retain_until_ns`: how long an ended resumable one is kept.
    """

    core_id: str
    submission: Submission
    time: Timeline
    output: RequestOutput
    place: Place = Place.PENDING
    request: Request | None = None
    outlet: Outlet | None = None
    cached_prompt_tokens: int = 0
    num_accepted_drafts: int = 0
    num_rejected_drafts: int = 0
    num_losses: int = 0
    failure: engine_pb2.Failed | None = None
    account_at_end: engine_pb2.RequestAccount | None = None
    retain_until_ns: int = 0
    trace: RequestTrace | None = field(default=None, repr=False)
    worker_id: str = ""
    last_event: Event | None = None

    @property
    def is_waiting(self) -> bool:
        """Accepted and never scheduled: what the bounded queue counts."""
        return not self.is_over and self.time.first_scheduled_ns is None

    @property
    def is_over(self) -> bool:
        """Its end is known; set exactly once."""
        return self.account_at_end is not None

    @property
    def log_context(self) -> LogContext:
        """What a line in the log about it says of it."""
        submission = self.submission
        trace = submission.sampling.trace
        traceparent = "" if trace is None else trace.traceparent
        return LogContext.of_message(
            request_id=submission.request_id, tenant=submission.tenant, traceparent=traceparent
        )

    def name(self, choice: int) -> str:
        """Name of the sequence behind a choice, where choices are not ranked."""
        return f"{self.core_id}/{choice}"

    def touch(self) -> None:
        """Tells the reader that there is something new."""
        if self.outlet is not None:
            self.outlet.reader.touch(self.outlet)

    def on_scheduled(self, now_ns: int) -> bool:
        """It is in a plan as a newcomer or again after a loss; True the first time."""
        if self.time.preempted_since_ns is not None:
            self.time.preempted_ns += now_ns - self.time.preempted_since_ns
            self.time.preempted_since_ns = None
        if self.time.first_scheduled_ns is not None:
            return False
        self.time.first_scheduled_ns = now_ns
        return True

    def message(self, now_ns: int) -> engine_pb2.Submit:
        """A resumable request as it was submitted, with the time left and its age as of now."""
        message = engine_pb2.Submit()
        assert self.submission.message is not None
        message.CopyFrom(self.submission.message)
        message.arrival_age_ns = max(0, now_ns - self.time.arrival_ns)
        deadline_ns = self.submission.deadline_ns
        message.remaining_ns = 0 if deadline_ns is None else max(1, deadline_ns - now_ns)
        return message

    def account(self, now_ns: int) -> engine_pb2.RequestAccount:
        """What it used until now."""
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
