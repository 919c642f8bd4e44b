"""One request as the gateway holds it towards the scheduler: what to submit, what has come back, who waits for it.

Everything new since the last look is taken at once, so a slow reader coalesces by itself. Exactly-once goes by (choice,
token_offset): repeated tokens are dropped here, missing ones are noticed. Not here: the stream to the scheduler (scheduler_link),
text (generation).
"""

import asyncio
import contextlib
from array import array
from collections.abc import Awaitable, Sequence
from dataclasses import dataclass, field

from gateway_svc.engine.submission_spans import SubmissionSpans
from gateway_svc.engine.token_runs import TokenRun, committed_message
from protos.common.v1 import common_pb2
from protos.engine.v1 import engine_pb2
from svc_common import wire_arrays
from svc_common.clock import monotonic_ns
from svc_common.errors import DeadlineExceeded, QuireError

_LOGPROB_BYTES = 32
_TOPS_BYTES = 700


_PARTIAL_LEAD_NS = 20_000_000
"""Of a request that ends with what there is the scheduler, which has the last tokens and the account, is to speak first."""


@dataclass(slots=True)
class ChoiceUpdate:
    """Everything new of one choice: tokens in a row, and how it ended. `num_tokens`: of the run; its ids are filled in when it is
    read, as until then the request has them anyway."""

    run: TokenRun = field(default_factory=TokenRun)
    num_tokens: int = 0
    finished: engine_pb2.Finished | None = None


@dataclass(slots=True)
class Update:
    """Everything new of a request, its choices by number. `account`: it is over. `num_bytes`: see EngineRequest."""

    choices: dict[int, ChoiceUpdate] = field(default_factory=dict)
    num_bytes: int = 0
    started: engine_pb2.Started | None = None
    prompt_logprobs: engine_pb2.PromptLogprobs | None = None
    embedding: engine_pb2.Embedding | None = None
    account: engine_pb2.RequestAccount | None = None

    def choice(self, number: int) -> ChoiceUpdate:
        """The update of that choice, made where there is none yet."""
        found = self.choices.get(number)
        if found is None:
            found = self.choices[number] = ChoiceUpdate()
        return found

    @property
    def has_output(self) -> bool:
        """Whether anything in it was made for the client."""
        return bool(self.choices or self.prompt_logprobs or self.embedding)


@dataclass(slots=True)
class _Choice:
    """What has come of one choice. `num_counting`: its tokens that count, once it has ended (here or at the scheduler).

    `beside`: what came beside the tokens, for later readers; None where there are none, or nothing comes beside them.
    """

    token_ids: "array[int]" = field(default_factory=lambda: array("i"))
    num_counting: int | None = None
    beside: TokenRun | None = None


class EngineRequest:
    """Owner of one request's inbox. Fed by the request table, read by exactly one task; both on the event loop's thread.

    `submit`: the message without the parts that depend on the moment. `deadline_ns`: on this process' monotonic clock.
    `returns_partial`: at its deadline it ends with what there is, if there is anything.
    `was_sent`: the scheduler may know it. `was_started`: it has been scheduled. `is_over`: nothing more comes.
    `is_attaching`: what `submit` names is to be read on; what it is, the scheduler will say. `was_attached`: it has said so; then
    `submit` is what was submitted before. `num_made`: output tokens that each choice had then. `spans`: what its trace shows
    of its way to the scheduler, None = nothing.
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
        self._has_passed_over = False
        self.is_resyncing = False
        self._choices = self._new_choices()
        self._update = Update()
        self._error: QuireError | None = None
        self._waiter: asyncio.Future[None] | None = None

    def _new_choices(self) -> list[_Choice]:
        has_later_readers = self.submit.resumable and self.submit.sampling.logprobs
        return [_Choice(beside=TokenRun() if has_later_readers else None) for _ in range(self.num_choices)]

    @property
    def handle(self) -> int:
        """Its number on the stream."""
        return self.submit.handle

    @property
    def request_id(self) -> str:
        """Its public id."""
        return self.submit.request_id

    @property
    def key(self) -> tuple[str, str]:
        """Tenant and public id."""
        return self.submit.tenant, self.submit.request_id

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens of the prompt."""
        return len(self.submit.token_ids) // 4

    @property
    def is_ranked(self) -> bool:
        """Its choices are the best of more sequences, or beams: it starts from the prompt after a loss."""
        return self.submit.HasField("beam") or self.submit.best_of > self.num_choices

    @property
    def num_received_tokens(self) -> int:
        """Output tokens so far, over all choices."""
        return sum(len(choice.token_ids) for choice in self._choices)

    @property
    def num_output_tokens(self) -> int:
        """Of these, those that count."""
        counts = (choice.num_counting for choice in self._choices)
        known = (len(choice.token_ids) for choice in self._choices)
        return sum(num if count is None else min(num, count) for num, count in zip(known, counts, strict=True))

    @property
    def num_unread_tokens(self) -> int:
        """Of these, not taken by the reader yet."""
        return sum(choice.num_tokens for choice in self._update.choices.values())

    @property
    def num_unread_bytes(self) -> int:
        """What these take, about, with what came beside them; without what was there before the reader came."""
        return self._update.num_bytes

    def _num_bytes(self, choice: int, run: TokenRun) -> int:
        """What a run takes that has just come; nothing of the tokens that were made before the reader came."""
        made = self.num_made[choice] if choice < len(self.num_made) else 0
        num_new = min(len(run.token_ids), max(0, len(self._choices[choice].token_ids) - made))
        return num_new * (4 + _LOGPROB_BYTES * bool(run.logprobs) + _TOPS_BYTES * bool(run.tops))

    @property
    def all_choices_ended(self) -> bool:
        """Every choice is complete; only the account may be missing."""
        return all(choice.num_counting is not None for choice in self._choices)

    def has_ended(self, choice: int) -> bool:
        """Whether this choice takes no more tokens."""
        return self._choices[choice].num_counting is not None

    # --- from the scheduler ------------------------------------------------------------------------------------------

    def frontend_state(self) -> engine_pb2.FrontendState:
        """How its tokens become events, as whoever submitted it said."""
        return engine_pb2.FrontendState.FromString(self.submit.frontend_state)

    def confirm(self, held: engine_pb2.HeldRequest) -> None:
        """The scheduler has it: as submitted here, or as somebody submitted it before, all of whose output follows."""
        if held.HasField("submit"):
            handle, now = self.handle, monotonic_ns()
            self.submit = held.submit
            self.submit.handle, self.submit.frontend_state = handle, held.frontend_state
            self.arrival_ns = now - held.submit.arrival_age_ns
            self.deadline_ns = now + held.submit.remaining_ns if held.submit.remaining_ns else self.deadline_ns
            self.num_made = wire_arrays.unpack(held.token_offsets, "attached.token_offsets", wire_arrays.U32).tolist()
            self.num_choices = self.submit.num_choices or 1
            self._choices = self._new_choices()
            self.returns_partial = self.frontend_state().partial_at_deadline
            self.is_attaching, self.was_attached = False, True
        self._wake()

    def add_tokens(self, choice: int, run: TokenRun) -> bool:
        """Takes a run of tokens; False when tokens before it are missing. What is known already is dropped."""
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
        """Whether this end has to come again: tokens of its choice are missing, or an end before this last one was passed over."""
        choice = self._choices[finished.choice]
        if choice.num_counting is None and len(choice.token_ids) < finished.num_output_tokens:
            self._has_passed_over = True
            return True
        others = (other for number, other in enumerate(self._choices) if number != finished.choice)
        return self._has_passed_over and finished.last and any(other.num_counting is None for other in others)

    def start(self, started: engine_pb2.Started) -> None:
        """It was scheduled for the first time."""
        self.was_started = True
        self._update.started = started
        self._wake()

    def add_prompt_logprobs(self, message: engine_pb2.PromptLogprobs) -> None:
        """Log probabilities of the prompt."""
        self._update.prompt_logprobs = message
        self._wake()

    def add_embedding(self, message: engine_pb2.Embedding) -> None:
        """The prompt's vector."""
        self._update.embedding = message
        self._wake()

    def stop(self, choice: int, num_tokens: int) -> None:
        """A stop string ended the choice; `num_tokens` of it count."""
        self._choices[choice].num_counting = num_tokens

    def finish(self, finished: engine_pb2.Finished) -> None:
        """A choice ended by itself, with `last` the request. The first end of each wins."""
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
        """It ended without result; what came before can still be read. The first end wins.

        A deadline is no failure where all is complete but the account, or where what there is is wanted.
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
        """Ends what is complete, when the scheduler's own account is not coming, or came elsewhere (`account`)."""
        if not self.is_over:
            self._update.account = account or engine_pb2.RequestAccount(prompt_tokens=self.num_prompt_tokens)
            self._end()
            self._wake()

    def abandon(self) -> None:
        """Its reader is gone, or has what it wanted: nothing more is taken."""
        self._end()

    def wait_for_scheduler(self, why: str) -> None:
        """The scheduler is away: the request is submitted, or submitted again, when it is back."""
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
        """Forgets what nobody will read, an end too: the reader gets `error`."""
        self._update = Update()
        self._error = self._error or error
        self._wake()

    def _wake(self) -> None:
        self._was_heard = True
        waiter, self._waiter = self._waiter, None
        if waiter is not None and not waiter.done():
            waiter.set_result(None)

    # --- to the reader -----------------------------------------------------------------------------------------------

    async def accepted(self) -> None:
        """Waits for the scheduler's first word: from then on `submit` is the request that is read. Raises the error it ended by."""
        if not self._was_heard:
            await self._news(None)
        if self._error is not None and not self._update.has_output:
            raise self._error

    def _news(self, timeout_s: float | None) -> Awaitable[None]:
        """Waits until there is news, or that much time has passed."""
        self._waiter = asyncio.get_running_loop().create_future()
        return self._waiter if timeout_s is None else _at_most(timeout_s, self._waiter)

    async def next(self, timeout_s: float | None = None) -> Update | None:
        """Everything new, waiting for it if need be; None after `timeout_s` of nothing. Raises the error it ended by."""
        if not self._has_news():
            await self._news(timeout_s)
        if not self._has_news():
            return None
        update, self._update = self._update, Update()
        if self._error is not None and not update.has_output:
            raise self._error
        for number, choice in update.choices.items():
            known = self._choices[number].token_ids
            choice.run.token_offset = len(known) - choice.num_tokens
            choice.run.token_ids = known[choice.run.token_offset :].tolist()
        return update

    def _has_news(self) -> bool:
        update = self._update
        return bool(update.choices or update.started or update.account or update.has_output or self._error)

    # --- to the scheduler --------------------------------------------------------------------------------------------

    def submit_message(self) -> engine_pb2.Submit:
        """The message as of now: time left, age, and what was received if it had been sent before. Marks it as sent."""
        now = monotonic_ns()
        message = engine_pb2.Submit()
        message.CopyFrom(self.submit)
        message.remaining_ns = max(1, self.deadline_ns - now - (_PARTIAL_LEAD_NS if self.returns_partial else 0))
        message.arrival_age_ns = now - self.arrival_ns
        if self._was_accepted:
            message.resubmitted = True
            message.committed.extend(self._committed())
        self._note_sent()
        return message

    @property
    def _was_accepted(self) -> bool:
        """Whether it may be known as submitted here. A resumable one that was not heard of may be somebody else's."""
        return self.was_sent and (self._was_heard or not self.submit.resumable)

    def submit_message_of_another_reader(self) -> engine_pb2.Submit:
        """The same request for a reader that begins anew, here."""
        message = engine_pb2.Submit()
        message.CopyFrom(self.submit)
        return message

    def attach_message(self) -> engine_pb2.Attach:
        """Asks for it by its id."""
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
            committed_message(number, choice.token_ids.tobytes(), choice.beside or TokenRun())
            for number, choice in enumerate(self._choices)
        ]

    def stops(self) -> list[engine_pb2.Stopped]:
        """For a scheduler that may not know: its choices that have ended, while others go on."""
        return [
            engine_pb2.Stopped(handle=self.handle, choice=number, token_offset=choice.num_counting)
            for number, choice in enumerate(self._choices)
            if choice.num_counting is not None
        ]


async def _at_most(timeout_s: float, news: asyncio.Future[None]) -> None:
    # Not wait_for, which forgets a cancel that comes together with news (Python 3.11).
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(timeout_s):
            await news
