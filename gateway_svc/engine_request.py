"""One request as the gateway holds it towards the scheduler: what to submit, what has come back, who waits for it.

Everything new since the last look is taken at once, so a slow reader coalesces by itself. Exactly-once goes by (choice,
token_offset): repeated tokens are dropped here, missing ones are noticed. Not here: the stream to the scheduler (scheduler_link),
text (generation).
"""

import asyncio
from array import array
from dataclasses import dataclass, field

from protos.common.v1 import common_pb2
from protos.engine.v1 import engine_pb2
from svc_common.clock import monotonic_ns
from svc_common.errors import QuireError

CHOICE = 0


@dataclass(slots=True)
class Update:
    """Everything new of a request: tokens from `token_offset` on (`logprobs` beside them, where asked), and how it ended."""

    token_offset: int = 0
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    started: engine_pb2.Started | None = None
    finished: engine_pb2.Finished | None = None


class EngineRequest:
    """Owner of one request's inbox. Fed by the request table, read by exactly one task; both on the event loop's thread.

    `submit`: the message without the parts that depend on the moment. `deadline_ns`: on this process' monotonic clock.
    `was_sent`: the scheduler may know it. `is_over`: nothing more comes. `stopped_at`: tokens that count after a stop string.
    """

    def __init__(self, submit: engine_pb2.Submit, deadline_ns: int) -> None:
        self.submit = submit
        self.deadline_ns = deadline_ns
        self.arrival_ns = monotonic_ns()
        self.was_sent = False
        self.is_over = False
        self.is_resyncing = False
        self.stopped_at: int | None = None
        self._received = array("i")
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
    def num_received_tokens(self) -> int:
        """Output tokens so far."""
        return len(self._received)

    @property
    def num_unread_tokens(self) -> int:
        """Of these, not taken by the reader yet."""
        return len(self._update.token_ids)

    # --- from the scheduler ------------------------------------------------------------------------------------------

    def add_tokens(self, offset: int, token_ids: list[int], logprobs: list[float]) -> bool:
        """Takes a run of tokens; False when tokens before it are missing. What is known already is dropped."""
        known = len(self._received)
        if offset > known:
            return False
        self.is_resyncing = False
        if offset < known:
            token_ids, logprobs = token_ids[known - offset :], logprobs[known - offset :]
        if token_ids and self.stopped_at is None and not self.is_over:
            self._received.extend(token_ids)
            self._update.token_ids += token_ids
            self._update.logprobs += logprobs
            self._wake()
        return True

    def start(self, started: engine_pb2.Started) -> None:
        """It was scheduled for the first time."""
        self._update.started = started
        self._wake()

    def finish(self, finished: engine_pb2.Finished) -> None:
        """It ended by itself. The first end wins."""
        if not self.is_over:
            self._update.finished = finished
            self.is_over = True
            self._wake()

    def fail(self, error: QuireError) -> None:
        """It ended without result; what came before can still be read. The first end wins."""
        if not self.is_over:
            self._error = error
            self.is_over = True
            self._wake()

    def finish_stopped(self) -> None:
        """Ends what a stop string had ended, when the scheduler's own account is not coming."""
        account = engine_pb2.RequestAccount(prompt_tokens=len(self.submit.token_ids) // 4)
        reason = common_pb2.FINISH_REASON_STOP
        self.finish(engine_pb2.Finished(handle=self.handle, reason=reason, last=True, account=account))

    def drop_unread(self) -> None:
        """Forgets tokens that nobody will read."""
        self._update.token_ids.clear()
        self._update.logprobs.clear()

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
        if self._error is not None and not update.token_ids:
            raise self._error
        update.token_offset = len(self._received) - len(update.token_ids)
        return update

    def _has_news(self) -> bool:
        update = self._update
        return bool(update.token_ids or update.started or update.finished or self._error)

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
            message.committed.add(choice=CHOICE, token_ids=self._received.tobytes())
        self.was_sent = True
        return message
