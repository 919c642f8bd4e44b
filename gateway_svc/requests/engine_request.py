"""One request at the gateway: the message to submit, the output received so far, and the task that waits for it.

A read returns everything new since the previous read, so output for a slow reader is merged. Output is
delivered exactly once, keyed by (choice, token_offset): repeated tokens are dropped and missing ones
detected. The stream to the scheduler is in `scheduler_link`, detokenisation in `generation`.
"""

import asyncio
import functools
from array import array
from collections.abc import Awaitable, Sequence
from dataclasses import dataclass, field

from gateway_svc.requests.request_update import Update
from gateway_svc.requests.submission_spans import SubmissionSpans
from gateway_svc.requests.token_runs import ChoiceTokens, committed_message
from protos.common.v1 import common_pb2
from protos.engine.v1 import engine_pb2
from svc_common import wire_arrays
from svc_common.clock import monotonic_ns
from svc_common.errors import DeadlineExceeded, QuireError

_LOGPROB_BYTES = 32
_TOPS_BYTES = 700


_PARTIAL_LEAD_NS = 20_000_000
"""Lead of the scheduler's deadline over the gateway's, for a request that returns partial output at its deadline.

It lets the scheduler, which has the last tokens and the account, end the request first.
"""


@dataclass(slots=True)
class _Choice:
    """State of one choice.

    `num_counting`: number of tokens that count, set once the choice ended (here or at the scheduler).
    `beside`: logprobs and top logprobs of all tokens so far, kept for later readers; None unless the request
    is resumable with logprobs.
    """

    token_ids: "array[int]" = field(default_factory=functools.partial(array, "i"))
    num_counting: int | None = None
    beside: ChoiceTokens | None = None


class EngineRequest:
    """Inbox of one request, fed by the request table and read by exactly one task, both on the event loop's thread.

    `submit`: the message without the fields that depend on the time of sending. `handle`: number of the
    request on the gateway stream. `deadline_ns`: on this
    process's monotonic clock. `returns_partial`: at the deadline the request ends with the output so far, if
    there is any. `was_sent`: the scheduler may know the request. `was_started`: it has been scheduled.
    `is_over`: no more output follows. `is_attaching`: the request names an existing one to resume; the
    scheduler will report what that is. `was_attached`: it has, and `submit` is the message submitted
    originally. `num_made`: output tokens that each choice had at that time. `spans`: the trace spans of the
    submission, None if not traced.
    """

    def __init__(
        self,
        submit: engine_pb2.Submit,
        deadline_ns: int,
        *,
        returns_partial: bool = False,
        is_attaching: bool = False,
        spans: SubmissionSpans | None = None,
    ) -> None:
        self.submit = submit
        self.handle = submit.handle
        self._spans = spans
        self.num_choices = submit.num_choices or 1
        self.deadline_ns = deadline_ns
        self.returns_partial = returns_partial
        self.arrival_ns = monotonic_ns()
        self.was_sent = False
        self.was_started = False
        self.is_over = False
        self.is_attaching = is_attaching
        self.was_attached = False
        self.num_made: Sequence[int] = ()
        self._was_heard = False
        self._has_news = False
        self._has_passed_over = False
        self.is_resyncing = False
        self._choices = self._new_choices()
        self._update = Update()
        self._error: QuireError | None = None
        self._waiter: asyncio.Future[None] | None = None

    def _new_choices(self) -> list[_Choice]:
        has_later_readers = self.submit.resumable and self.submit.sampling.logprobs
        return [_Choice(beside=ChoiceTokens() if has_later_readers else None) for _ in range(self.num_choices)]

    @property
    def request_id(self) -> str:
        """Public request id."""
        return self.submit.request_id

    @property
    def key(self) -> tuple[str, str]:
        """Tenant and public request id."""
        return self.submit.tenant, self.submit.request_id

    @property
    def num_prompt_tokens(self) -> int:
        """Number of prompt tokens."""
        return len(self.submit.token_ids) // 4

    @property
    def is_ranked(self) -> bool:
        """True for best_of and beam search; such a request restarts from the prompt after a loss."""
        return self.submit.HasField("beam") or self.submit.best_of > self.num_choices

    @property
    def num_received_tokens(self) -> int:
        """Output tokens received so far, over all choices."""
        return sum(len(choice.token_ids) for choice in self._choices)

    @property
    def num_output_tokens(self) -> int:
        """Received output tokens that count, i.e. without those after a stop."""
        counts = (choice.num_counting for choice in self._choices)
        known = (len(choice.token_ids) for choice in self._choices)
        return sum(num if count is None else min(num, count) for num, count in zip(known, counts, strict=True))

    @property
    def num_unread_tokens(self) -> int:
        """Received output tokens that the reader has not taken."""
        return sum(choice.num_tokens for choice in self._update.choices.values())

    @property
    def num_unread_bytes(self) -> int:
        """Approximate size of the unread tokens with their logprobs.

        Tokens generated before the reader attached do not count.
        """
        return self._update.num_bytes

    def _num_bytes(self, choice: int, run: ChoiceTokens) -> int:
        """Approximate size of a run just received, without tokens generated before the reader attached."""
        made = self.num_made[choice] if choice < len(self.num_made) else 0
        num_new = min(len(run.token_ids), max(0, len(self._choices[choice].token_ids) - made))
        return num_new * (4 + _LOGPROB_BYTES * bool(run.logprobs) + _TOPS_BYTES * bool(run.tops))

    @property
    def all_choices_ended(self) -> bool:
        """True if every choice is complete; only the account may be missing."""
        return all(choice.num_counting is not None for choice in self._choices)

    def has_ended(self, choice: int) -> bool:
        """True if this choice takes no more tokens."""
        return self._choices[choice].num_counting is not None

    # --- from the scheduler ------------------------------------------------------------------------------------------

    def frontend_state(self) -> engine_pb2.FrontendState:
        """How the tokens become events, as set by the original submitter."""
        return engine_pb2.FrontendState.FromString(self.submit.frontend_state)

    def confirm(self, held: engine_pb2.HeldRequest) -> None:
        """Accept the scheduler's confirmation of the request.

        It is the request as submitted here, or an earlier one with all of its output to follow.
        """
        if held.HasField("submit"):
            now = monotonic_ns()
            self.submit = held.submit
            self.submit.handle, self.submit.frontend_state = self.handle, held.frontend_state
            self.arrival_ns = now - held.submit.arrival_age_ns
            self.deadline_ns = now + held.submit.remaining_ns if held.submit.remaining_ns else self.deadline_ns
            self.num_made = wire_arrays.unpack(held.token_offsets, "attached.token_offsets", wire_arrays.U32).tolist()
            self.num_choices = self.submit.num_choices or 1
            self._choices = self._new_choices()
            self.returns_partial = self.frontend_state().partial_at_deadline
            self.is_attaching, self.was_attached = False, True
        self._wake(has_news=self._has_news)

    def add_tokens(self, choice: int, run: ChoiceTokens) -> bool:
        """Add a run of tokens, dropping those already received. Returns False if tokens before the run are missing."""
        state = self._choices[choice]
        known = len(state.token_ids)
        if run.token_offset > known:
            return False
        self.is_resyncing = False
        if run.token_offset < known:
            run = run.without_first(known - run.token_offset)
        if run.token_ids and state.num_counting is None and not self.is_over:
            state.token_ids.extend(run.token_ids)
            if state.beside is not None:
                state.beside.logprobs += run.logprobs
                state.beside.tops += run.tops
            self._update.num_bytes += self._num_bytes(choice, run)
            update = self._update.choice(choice)
            update.num_tokens += len(run.token_ids)
            update.run.logprobs += run.logprobs
            update.run.tops += run.tops
            self._wake()
        return True

    def passes_over(self, finished: engine_pb2.Finished) -> bool:
        """True if this finish message must be sent again.

        That is so if tokens of its choice are missing, or if it is the last one and an earlier finish message
        was skipped.
        """
        choice = self._choices[finished.choice]
        if choice.num_counting is None and len(choice.token_ids) < finished.num_output_tokens:
            self._has_passed_over = True
            return True
        others = (other for number, other in enumerate(self._choices) if number != finished.choice)
        return self._has_passed_over and finished.last and any(other.num_counting is None for other in others)

    def start(self, started: engine_pb2.Started) -> None:
        """Record that the request was scheduled for the first time."""
        self.was_started = True
        self._update.started = started
        self._wake()

    def add_prompt_logprobs(self, message: engine_pb2.PromptLogprobs) -> None:
        """Record logprobs of the prompt."""
        self._update.prompt_logprobs = message
        self._wake()

    def add_embedding(self, message: engine_pb2.Embedding) -> None:
        """Record the prompt's embedding."""
        self._update.embedding = message
        self._wake()

    def stop(self, choice: int, num_tokens: int) -> None:
        """Record that a stop string ended the choice; `num_tokens` of it count."""
        self._choices[choice].num_counting = num_tokens

    def finish(self, finished: engine_pb2.Finished) -> None:
        """Record the end of a choice and, with `last`, of the request. The first end of each choice wins."""
        if self.is_over:
            return
        state = self._choices[finished.choice]
        if state.num_counting is None:
            state.num_counting = len(state.token_ids)
            self._update.choice(finished.choice).finished = finished
        if finished.last:
            self._update.account = finished.account
            self._end()
        self._wake()

    def fail(self, error: QuireError, account: engine_pb2.RequestAccount | None = None) -> None:
        """End the request with an error; output received before can still be read. The first end wins.

        A deadline is not an error if only the account is missing, or if partial output is wanted and there is
        some.
        """
        if self.is_over:
            return
        if isinstance(error, DeadlineExceeded) and self._may_end_at_deadline():
            self._end_open_choices(common_pb2.FINISH_REASON_DEADLINE)
            self.finish_without_account(account)
            return
        self._error = error
        self._end()
        self._wake()

    def finish_without_account(self, account: engine_pb2.RequestAccount | None = None) -> None:
        """End a complete request when the scheduler's account will not arrive, or arrived otherwise (`account`)."""
        if not self.is_over:
            self._update.account = account or engine_pb2.RequestAccount(prompt_tokens=self.num_prompt_tokens)
            self._end()
            self._wake()

    def abandon(self) -> None:
        """End a request that will not be read any more."""
        self._end()

    def wait_for_scheduler(self, why: str) -> None:
        """Record that the scheduler is away; the request is (re)submitted when it is back."""
        if self._spans is not None and not self.is_over:
            self._spans.away(why, self.num_received_tokens)

    def _end(self) -> None:
        self.is_over = True
        if self._spans is not None:
            self._spans.completed()

    def _may_end_at_deadline(self) -> bool:
        return self.all_choices_ended or (self.returns_partial and self.num_received_tokens > 0)

    def _end_open_choices(self, reason: common_pb2.FinishReason) -> None:
        for number, choice in enumerate(self._choices):
            if choice.num_counting is None:
                choice.num_counting = len(choice.token_ids)
                self._update.choice(number).finished = engine_pb2.Finished(choice=number, reason=reason)

    def drop_unread(self, error: QuireError) -> None:
        """Discard unread output, including an end; the reader gets `error`."""
        self._update = Update()
        self._error = self._error or error
        self._wake()

    def _wake(self, *, has_news: bool = True) -> None:
        self._was_heard = True
        self._has_news = has_news
        waiter, self._waiter = self._waiter, None
        if waiter is not None and not waiter.done():
            waiter.set_result(None)

    # --- to the reader -----------------------------------------------------------------------------------------------

    async def accepted(self) -> None:
        """Wait for the scheduler's first message; from then on `submit` is the request that is read.

        Raises the error that ended the request.
        """
        if not self._was_heard:
            await self._news(None)
        if self._error is not None and not self._update.has_output:
            raise self._error

    def _news(self, timeout_s: float | None) -> Awaitable[object]:
        """Wait until there is news, at most `timeout_s`."""
        self._waiter = asyncio.get_running_loop().create_future()
        # Not wait_for, which loses a cancel that arrives together with news (Python 3.11).
        return self._waiter if timeout_s is None else asyncio.wait((self._waiter,), timeout=timeout_s)

    async def next(self, timeout_s: float | None = None) -> Update | None:
        """Return everything new, waiting for it if needed; None after `timeout_s` without news.

        Raises the error that ended the request.
        """
        if not self._has_news:
            await self._news(timeout_s)
            if not self._has_news:
                return None
        update, self._update = self._update, Update()
        self._has_news = self._error is not None
        if self._error is not None and not update.has_output:
            raise self._error
        for number, choice in update.choices.items():
            known = self._choices[number].token_ids
            choice.run.token_offset = len(known) - choice.num_tokens
            choice.run.token_ids = known[choice.run.token_offset :].tolist()
        return update

    # --- to the scheduler --------------------------------------------------------------------------------------------

    def submit_message(self) -> engine_pb2.Submit:
        """Build the message as of now: time left, age and, on resubmission, the tokens received.

        Marks the request as sent.
        """
        now = monotonic_ns()
        message = engine_pb2.Submit()
        message.CopyFrom(self.submit)
        message.remaining_ns = max(1, self.deadline_ns - now - (_PARTIAL_LEAD_NS if self.returns_partial else 0))
        message.arrival_age_ns = now - self.arrival_ns
        # A resumable request that the scheduler never answered may be one that another gateway submitted.
        if self.was_sent and (self._was_heard or not self.submit.resumable):
            message.resubmitted = True
            message.committed.extend(self._committed())
        self._note_sent()
        return message

    def submit_message_of_another_reader(self) -> engine_pb2.Submit:
        """Build the same request for a new reader at this gateway."""
        message = engine_pb2.Submit()
        message.CopyFrom(self.submit)
        return message

    def attach_message(self) -> engine_pb2.Attach:
        """Build the message that resumes the request by its id."""
        self._note_sent()
        return engine_pb2.Attach(handle=self.handle, request_id=self.request_id, tenant=self.submit.tenant)

    def _note_sent(self) -> None:
        self.was_sent = True
        if self._spans is not None:
            self._spans.sent()

    def _committed(self) -> list[engine_pb2.CommittedTokens]:
        if self.is_ranked:
            return []
        return [
            committed_message(number, choice.token_ids.tobytes(), choice.beside or ChoiceTokens())
            for number, choice in enumerate(self._choices)
        ]

    def stops(self) -> list[engine_pb2.Stopped]:
        """Stop messages of the choices that ended, for a scheduler that may not know of them."""
        return [
            engine_pb2.Stopped(handle=self.handle, choice=number, token_offset=choice.num_counting)
            for number, choice in enumerate(self._choices)
            if choice.num_counting is not None
        ]
