"""Live requests of this gateway by handle and by public id, with deadlines, takeovers and dispatch of the scheduler's messages."""

import asyncio
import itertools

from gateway_svc.engine.outbox import Outbox
from gateway_svc.requests.engine_request import EngineRequest
from gateway_svc.requests.submission_spans import SubmissionSpans
from gateway_svc.requests.token_runs import read_runs
from protos.engine.v1 import engine_pb2
from svc_common.clock import NS_PER_S, monotonic_ns
from svc_common.errors import (
    Aborted,
    AlreadyExists,
    DeadlineExceeded,
    InvalidArgument,
    NotFound,
    QuireError,
    ResourceExhausted,
)
from svc_common.net import rpc

MESSAGES_PER_BACKLOG_CHECK = 64
MAX_UNREAD_BYTES = 192 * 1_024
"""Limit per stream: 48 thousand tokens, fewer with logprobs. With the transport's buffers it stays below 256 KiB."""


class RequestTable:
    """Table of live requests, from `add` to `release`. Call only on the event loop's thread."""

    def __init__(self, outbox: Outbox, max_unread_tokens: int) -> None:
        self._outbox = outbox
        self._max_unread_tokens = max_unread_tokens
        self._handles = itertools.count(1)
        self._by_handle: dict[int, EngineRequest] = {}
        self._by_id: dict[tuple[str, str], EngineRequest] = {}
        self._lost: set[int] = set()
        self._timers: dict[int, asyncio.TimerHandle] = {}
        self._num_messages = 0

    def __len__(self) -> int:
        return len(self._by_handle)

    def __iter__(self) -> "itertools.chain[EngineRequest]":
        return itertools.chain(list(self._by_handle.values()))

    def __contains__(self, handle: int) -> bool:
        return handle in self._by_handle

    def add(
        self,
        submit: engine_pb2.Submit,
        deadline_ns: int,
        *,
        returns_partial: bool = False,
        is_attaching: bool = False,
        spans: SubmissionSpans | None = None,
    ) -> EngineRequest:
        """Add a request under the next handle. `is_attaching`: resume the request that `submit` names.

        A resumable request that is read here already moves to the new reader. Raises AlreadyExists for any
        other id that is live here.
        """
        key = submit.tenant, submit.request_id
        former = self._by_id.get(key)
        if former is not None:
            check_may_take_over(former, submit, is_attaching=is_attaching)
            self._lose(former)
            if not former.is_attaching:
                submit, is_attaching = former.submit_message_of_another_reader(), False
        submit.handle = next(self._handles)
        request = EngineRequest(
            submit, deadline_ns, returns_partial=returns_partial, is_attaching=is_attaching, spans=spans
        )
        request.arrival_ns = request.arrival_ns if former is None else former.arrival_ns
        self._by_handle[submit.handle] = request
        self._by_id[key] = request
        delay_s = max(0.0, (deadline_ns - monotonic_ns()) / NS_PER_S)
        self._timers[submit.handle] = asyncio.get_running_loop().call_later(delay_s, self._expire, request)
        return request

    def _lose(self, request: EngineRequest) -> None:
        """Take the request away from its reader, which another one replaced; the scheduler needs no message."""
        request.fail(attached_elsewhere())
        self._forget(request)
        self._lost.add(request.handle)

    def find(self, tenant: str, request_id: str) -> EngineRequest | None:
        """Return the live request of this public id, if any."""
        return self._by_id.get((tenant, request_id))

    def release(self, request: EngineRequest) -> None:
        """Forget a request. One that is not over is cancelled at the scheduler, or detached if resumable. Idempotent."""
        if request.handle not in self._by_handle:
            return
        self._forget(request)
        if not request.is_over:
            request.abandon()
            self._tell_gone(request)

    def _forget(self, request: EngineRequest) -> None:
        del self._by_handle[request.handle]
        del self._by_id[request.key]
        self._timers.pop(request.handle).cancel()
        self._outbox.withdraw(request)

    def end(self, request: EngineRequest, error: QuireError) -> None:
        """End a request with `error`, here and at the scheduler."""
        if not request.is_over:
            request.fail(error)
            self._outbox.withdraw(request)
            self._tell_cancelled(request)

    def leave(self, request: EngineRequest, error: QuireError) -> None:
        """End the reading of a request with `error`; a resumable one goes on at the scheduler and can be resumed."""
        if not request.is_over:
            request.fail(error)
            self._outbox.withdraw(request)
            self._tell_gone(request)

    def _tell_gone(self, request: EngineRequest) -> None:
        if request.submit.resumable and request.was_sent:
            self._outbox.detach(request.handle)
        else:
            self._tell_cancelled(request)

    def _tell_cancelled(self, request: EngineRequest) -> None:
        if request.was_sent:
            self._outbox.cancel(engine_pb2.Cancel(handle=request.handle))

    def _expire(self, request: EngineRequest) -> None:
        """End a request at its deadline, or at that of the call which resumed it."""
        reason = "DURING_DECODE" if request.num_received_tokens else "EXPIRED_IN_QUEUE"
        request.returns_partial &= not request.was_attached
        # The scheduler enforces the request's own deadline; a resumable one may have readers after this one.
        self.leave(request, DeadlineExceeded("the deadline passed before the request was done", reason=reason))

    # --- messages from the scheduler ---------------------------------------------------------------------------------

    def receive(self, message: engine_pb2.EngineMessage) -> None:
        """Dispatch each part to its request, ignoring released ones. Raises InvalidArgument for a malformed message."""
        if message.attached or message.started:
            self._receive_beginnings(message)
        if message.HasField("tokens"):
            self._receive_tokens(message.tokens)
        if message.prompt_logprobs or message.embeddings:
            self._receive_parts(message)
        for finished in message.finished:
            if (request := self._by_handle.get(finished.handle)) is not None:
                self._finish(request, finished)
        for failed in message.failed:
            if (request := self._by_handle.get(failed.handle)) is not None:
                request.fail(rpc.from_error_status(failed.error), failed.account)
        self._num_messages += 1
        if self._num_messages % MESSAGES_PER_BACKLOG_CHECK == 0:
            self._shed()

    def _receive_beginnings(self, message: engine_pb2.EngineMessage) -> None:
        for held in message.attached:
            if (request := self._by_handle.get(held.handle)) is not None:
                request.confirm(held)
        for started in message.started:
            if (request := self._by_handle.get(started.handle)) is not None:
                request.start(started)

    def _receive_tokens(self, tokens: engine_pb2.TokenColumns) -> None:
        for handle, choice, run in read_runs(tokens):
            request = self._by_handle.get(handle)
            if request is None:
                continue
            if choice >= request.num_choices:
                raise _unknown(request, choice)
            if not request.add_tokens(choice, run):
                self._resync(request)
            elif request.num_unread_bytes > MAX_UNREAD_BYTES:
                self._cut_off(request)

    def _receive_parts(self, message: engine_pb2.EngineMessage) -> None:
        for logprobs in message.prompt_logprobs:
            if (request := self._by_handle.get(logprobs.handle)) is not None:
                request.add_prompt_logprobs(logprobs)
        for embedding in message.embeddings:
            if (request := self._by_handle.get(embedding.handle)) is not None:
                request.add_embedding(embedding)

    def _finish(self, request: EngineRequest, finished: engine_pb2.Finished) -> None:
        if finished.choice >= request.num_choices:
            raise _unknown(request, finished.choice)
        if request.passes_over(finished):
            self._resync(request)
        else:
            request.finish(finished)

    def _resync(self, request: EngineRequest) -> None:
        """Resubmit a request with missing tokens; the scheduler then sends all after those received."""
        if not request.is_resyncing and not request.is_over:
            request.is_resyncing = True
            self._outbox.submit(request)

    def _shed(self) -> None:
        """End the streams with the most unread tokens until the total is within the limit."""
        total = sum(request.num_unread_tokens for request in self)
        while total > self._max_unread_tokens:
            slowest = max(self, key=lambda request: request.num_unread_tokens)
            total -= slowest.num_unread_tokens
            self._cut_off(slowest)

    def _cut_off(self, request: EngineRequest) -> None:
        """End a stream with a slow reader, to protect the others."""
        error = ResourceExhausted("this reader takes its tokens too slowly", reason="SLOW_READER")
        self.leave(request, error)
        request.drop_unread(error)

    # --- after a loss ------------------------------------------------------------------------------------------------

    def resume(self, held: set[int], detached: set[int]) -> None:
        """Resubmit live requests on a new stream.

        Of the requests that the scheduler holds (`held`), those unknown here are cancelled, except the
        `detached` ones.
        """
        lost, self._lost = self._lost, set()
        for handle in sorted(held - self._by_handle.keys() - detached - lost):
            self._outbox.cancel(engine_pb2.Cancel(handle=handle))
        for request in self:
            if request.is_over:
                continue
            if request.all_choices_ended and not request.submit.resumable:
                self._outbox.cancel(engine_pb2.Cancel(handle=request.handle))
                request.finish_without_account()
            else:
                self._outbox.submit(request)

    def stop(self, request: EngineRequest, choice: int, token_offset: int) -> None:
        """Record that a stop string ended a choice; `token_offset` of its tokens count."""
        is_news = not request.is_over and not request.has_ended(choice)
        request.stop(choice, token_offset)
        if is_news:
            self._outbox.stop(engine_pb2.Stopped(handle=request.handle, choice=choice, token_offset=token_offset))


def _unknown(request: EngineRequest, choice: int) -> InvalidArgument:
    return InvalidArgument.field("choice", f"is {choice}; request {request.request_id} has {request.num_choices}")


def check_may_take_over(former: EngineRequest, submit: engine_pb2.Submit, *, is_attaching: bool) -> None:
    """Check that the reader of `submit` may take over `former`: both resumable and the same request.

    Raises AlreadyExists or NotFound.
    """
    if not (former.submit.resumable and submit.resumable):
        raise _not_resumable(submit) if is_attaching else _in_use(submit, "is running here")
    is_known = not (is_attaching or former.is_attaching)
    if is_known and (former.submit.token_ids, former.submit.task) != (submit.token_ids, submit.task):
        raise _in_use(submit, "is running here for another prompt, or of another kind")


def attached_elsewhere() -> Aborted:
    """Error for the reader that was replaced."""
    return Aborted("another reader attached to this request", reason="ATTACHED_ELSEWHERE")


def _in_use(submit: engine_pb2.Submit, how: str) -> QuireError:
    return AlreadyExists(
        f"a request with id {submit.request_id} {how}; use another x-request-id or none",
        reason="REQUEST_ID_IN_USE",
        metadata={"request_id": submit.request_id},
    )


def _not_resumable(submit: engine_pb2.Submit) -> QuireError:
    return NotFound(
        "the request of this id is not resumable; send requests with resumable = true that are to be read on",
        reason="RESUME_EXPIRED",
        resource_type="request",
        resource_name=submit.request_id,
    )
