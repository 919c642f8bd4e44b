"""One request as the gateway holds it towards the scheduler: what to submit, what has come back, who waits for it.

Everything new since the last look is taken at once, so a slow reader coalesces by itself. Exactly-once goes by (choice,
token_offset): repeated tokens are dropped here, missing ones are noticed. Not here: the stream to the scheduler (scheduler_link),
text (generation).
"""

import asyncio
from array import array
from dataclasses import dataclass, field

from gateway_svc.token_runs import TokenRun
from protos.engine.v1 import engine_pb2
from svc_common.clock import monotonic_ns
from svc_common.errors import QuireError


@dataclass(slots=True)
class ChoiceUpdate:
    """Everything new of one choice: tokens in a row, and how it ended."""

    run: TokenRun = field(default_factory=TokenRun)
    finished: engine_pb2.Finished | None = None


@dataclass(slots=True)
class Update:
    """Everything new of a request, its choices by number. `account`: it is over."""

    choices: dict[int, ChoiceUpdate] = field(default_factory=dict)
    started: engine_pb2.Started | None = None
    prompt_logprobs: engine_pb2.PromptLogprobs | None = None
    embedding: engine_pb2.Embedding | None = None
    account: engine_pb2.RequestAccount | None = None

    def choice(self, number: int) -> ChoiceUpdate:
        """The update of that choice, made where there is none yet."""
        return self.choices.setdefault(number, ChoiceUpdate())

    @property
    def has_output(self) -> bool:
        """Whether anything in it was made for the client."""
        return bool(self.choices or self.prompt_logprobs or self.embedding)


@dataclass(slots=True)
class _Choice:
    """What has come of one choice. `num_counting`: its tokens that count, once it has ended (here or at the scheduler)."""

    token_ids: "array[int]" = field(default_factory=lambda: array("i"))
    num_counting: int | None = None


class EngineRequest:
    """Owner of one request's inbox. Fed by the request table, read by exactly one task; both on the event loop's thread.

    `submit`: the message without the parts that depend on the moment. `deadline_ns`: on this process' monotonic clock.
    `was_sent`: the scheduler may know it. `is_over`: nothing more comes.
    """

    def __init__(self, submit: engine_pb2.Submit, deadline_ns: int) -> None:
        self.submit = submit
        self.deadline_ns = deadline_ns
        self.arrival_ns = monotonic_ns()
        self.was_sent = False
        self.is_over = False
        self.is_resyncing = False
        self._choices = [_Choice() for _ in range(self.num_choices)]
        self._update = Update()
        self._error: QuireError | None = None
        self._waiter: asyncio.Future[None] | None = None

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
    def num_choices(self) -> int:
        """Choices that it returns."""
        return self.submit.num_choices or 1

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
    def num_unread_tokens(self) -> int:
        """Of these, not taken by the reader yet."""
        return sum(len(choice.run.token_ids) for choice in self._update.choices.values())

    @property
    def all_choices_ended(self) -> bool:
        """Every choice is complete; only the account may be missing."""
        return all(choice.num_counting is not None for choice in self._choices)

    def has_ended(self, choice: int) -> bool:
        """Whether this choice takes no more tokens."""
        return self._choices[choice].num_counting is not None

    # --- from the scheduler ------------------------------------------------------------------------------------------

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
            self._update.choice(choice).run.extend(run)
            self._wake()
        return True

    def is_missing_tokens(self, finished: engine_pb2.Finished) -> bool:
        """Whether tokens of the choice that ended have not come."""
        choice = self._choices[finished.choice]
        return choice.num_counting is None and len(choice.token_ids) < finished.num_output_tokens

    def start(self, started: engine_pb2.Started) -> None:
        """It was scheduled for the first time."""
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
            self.is_over = True
        self._wake()

    def fail(self, error: QuireError) -> None:
        """It ended without result; what came before can still be read. The first end wins."""
        if not self.is_over:
            self._error = error
            self.is_over = True
            self._wake()

    def finish_without_account(self) -> None:
        """Ends what is complete, when the scheduler's own account is not coming."""
        if not self.is_over:
            self._update.account = engine_pb2.RequestAccount(prompt_tokens=self.num_prompt_tokens)
            self.is_over = True
            self._wake()

    def drop_unread(self) -> None:
        """Forgets tokens that nobody will read."""
        self._update.choices.clear()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    # --- to the reader -----------------------------------------------------------------------------------------------

    async def next(self, timeout_s: float | None = None) -> Update | None:
        """Everything new, waiting for it if need be; None after `timeout_s` of nothing. Raises the error it ended by."""
        if not self._has_news():
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await (self._waiter if timeout_s is None else asyncio.wait_for(self._waiter, timeout_s))
            except TimeoutError:
                return None
            finally:
                self._waiter = None
        update, self._update = self._update, Update()
        if self._error is not None and not update.has_output:
            raise self._error
        for number, choice in update.choices.items():
            choice.run.token_offset = len(self._choices[number].token_ids) - len(choice.run.token_ids)
        return update

    def _has_news(self) -> bool:
        update = self._update
        return bool(update.has_output or update.started or update.account or self._error)

    # --- to the scheduler --------------------------------------------------------------------------------------------

    def submit_message(self) -> engine_pb2.Submit:
        """The message as of now: time left, age, and what was received if it had been sent before. Marks it as sent."""
        now = monotonic_ns()
        message = engine_pb2.Submit()
        message.CopyFrom(self.submit)
        message.remaining_ns = max(1, self.deadline_ns - now)
        message.arrival_age_ns = now - self.arrival_ns
        if self.was_sent:
            message.resubmitted = True
            message.committed.extend(self._committed())
        self.was_sent = True
        return message

    def _committed(self) -> list[engine_pb2.CommittedTokens]:
        if self.is_ranked:
            return []
        return [
            engine_pb2.CommittedTokens(choice=number, token_ids=choice.token_ids.tobytes())
            for number, choice in enumerate(self._choices)
        ]

    def stops(self) -> list[engine_pb2.Stopped]:
        """For a scheduler that may not know: its choices that have ended, while others go on."""
        return [
            engine_pb2.Stopped(handle=self.handle, choice=number, token_offset=choice.num_counting)
            for number, choice in enumerate(self._choices)
            if choice.num_counting is not None
        ]
