"""Live requests of this gateway by handle and by public id, their deadlines, and what the scheduler's messages mean to them."""

import asyncio
import itertools

from gateway_svc.engine_request import EngineRequest
from gateway_svc.outbox import Outbox
from gateway_svc.token_runs import read_runs
from protos.engine.v1 import engine_pb2
from svc_common import rpc
from svc_common.clock import NS_PER_S, monotonic_ns
from svc_common.errors import AlreadyExists, DeadlineExceeded, InvalidArgument, QuireError, ResourceExhausted

MESSAGES_PER_BACKLOG_CHECK = 64


class RequestTable:
    """Owner of live requests, from `add` to `release`. All calls on the event loop's thread."""

    def __init__(self, outbox: Outbox, max_unread_tokens: int) -> None:
        self._outbox = outbox
        self._max_unread_tokens = max_unread_tokens
        self._handles = itertools.count(1)
        self._by_handle: dict[int, EngineRequest] = {}
        self._by_id: dict[tuple[str, str], EngineRequest] = {}
        self._timers: dict[int, asyncio.TimerHandle] = {}
        self._num_messages = 0

    def __len__(self) -> int:
        return len(self._by_handle)

    def __iter__(self) -> "itertools.chain[EngineRequest]":
        return itertools.chain(list(self._by_handle.values()))

    def __contains__(self, handle: int) -> bool:
        return handle in self._by_handle

    def add(self, submit: engine_pb2.Submit, deadline_ns: int) -> EngineRequest:
        """A new request under the next handle. AlreadyExists when its id is live here."""
        if (submit.tenant, submit.request_id) in self._by_id:
            raise AlreadyExists(
                f"a request with id {submit.request_id} is running here; use another x-request-id or none",
                reason="REQUEST_ID_IN_USE",
                metadata={"request_id": submit.request_id},
            )
        submit.handle = next(self._handles)
        request = EngineRequest(submit, deadline_ns)
        self._by_handle[submit.handle] = request
        self._by_id[request.key] = request
        delay_s = max(0.0, (deadline_ns - monotonic_ns()) / NS_PER_S)
        self._timers[submit.handle] = asyncio.get_running_loop().call_later(delay_s, self._expire, request)
        return request

    def find(self, tenant: str, request_id: str) -> EngineRequest | None:
        """By public id."""
        return self._by_id.get((tenant, request_id))

    def release(self, request: EngineRequest) -> None:
        """Forgets a request; one that is not over is cancelled at the scheduler at once. Idempotent."""
        if self._by_handle.pop(request.handle, None) is None:
            return
        del self._by_id[request.key]
        self._timers.pop(request.handle).cancel()
        self._outbox.withdraw(request)
        if not request.is_over:
            request.is_over = True
            self._tell_cancelled(request)

    def end(self, request: EngineRequest, error: QuireError) -> None:
        """Ends a request by `error`, here and at the scheduler."""
        if not request.is_over:
            request.fail(error)
            self._outbox.withdraw(request)
            self._tell_cancelled(request)

    def _tell_cancelled(self, request: EngineRequest) -> None:
        if request.was_sent:
            self._outbox.cancel(engine_pb2.Cancel(handle=request.handle))

    def _expire(self, request: EngineRequest) -> None:
        reason = "DURING_DECODE" if request.num_received_tokens else "EXPIRED_IN_QUEUE"
        self.end(request, DeadlineExceeded("the deadline passed before the request was done", reason=reason))

    # --- what arrives ------------------------------------------------------------------------------------------------

    def receive(self, message: engine_pb2.EngineMessage) -> None:
        """Hands each part to its request; parts of requests that are gone are ignored. InvalidArgument for a broken message."""
        for started in message.started:
            if (request := self._by_handle.get(started.handle)) is not None:
                request.start(started)
        if message.HasField("tokens"):
            self._receive_tokens(message.tokens)
        self._receive_parts(message)
        for finished in message.finished:
            if (request := self._by_handle.get(finished.handle)) is not None:
                self._finish(request, finished)
        for failed in message.failed:
            if (request := self._by_handle.get(failed.handle)) is not None:
                request.fail(rpc.from_error_status(failed.error))
        self._num_messages += 1
        if self._num_messages % MESSAGES_PER_BACKLOG_CHECK == 0:
            self._shed()

    def _receive_tokens(self, tokens: engine_pb2.TokenColumns) -> None:
        for handle, choice, run in read_runs(tokens):
            request = self._by_handle.get(handle)
            if request is not None and not request.add_tokens(_known(request, choice), run):
                self._resync(request)

    def _receive_parts(self, message: engine_pb2.EngineMessage) -> None:
        for logprobs in message.prompt_logprobs:
            if (request := self._by_handle.get(logprobs.handle)) is not None:
                request.add_prompt_logprobs(logprobs)
        for embedding in message.embeddings:
            if (request := self._by_handle.get(embedding.handle)) is not None:
                request.add_embedding(embedding)

    def _finish(self, request: EngineRequest, finished: engine_pb2.Finished) -> None:
        _known(request, finished.choice)
        if request.is_missing_tokens(finished):
            self._resync(request)
        else:
            request.finish(finished)

    def _resync(self, request: EngineRequest) -> None:
        """Tokens are missing: submitting again asks for all from where the known ones end."""
        if not request.is_resyncing and not request.is_over:
            request.is_resyncing = True
            self._outbox.submit(request)

    def _shed(self) -> None:
        """Ends the stream with the most unread tokens while there are too many in all."""
        total = sum(request.num_unread_tokens for request in self)
        while total > self._max_unread_tokens:
            slowest = max(self, key=lambda request: request.num_unread_tokens)
            total -= slowest.num_unread_tokens
            self.end(slowest, ResourceExhausted("this reader takes its tokens too slowly", reason="SLOW_READER"))
            slowest.drop_unread()

    # --- after a loss ------------------------------------------------------------------------------------------------

    def resume(self, held: set[int]) -> None:
        """On a new stream: live requests are submitted again, `held` ones that are gone here are cancelled."""
        for handle in sorted(held - self._by_handle.keys()):
            self._outbox.cancel(engine_pb2.Cancel(handle=handle))
        for request in self:
            if request.is_over:
                continue
            if request.all_choices_ended:
                self._outbox.cancel(engine_pb2.Cancel(handle=request.handle))
                request.finish_without_account()
            else:
                self._outbox.submit(request)

    def stop(self, request: EngineRequest, choice: int, token_offset: int) -> None:
        """A stop string ended a choice: `token_offset` tokens of it count."""
        is_news = not request.is_over and not request.has_ended(choice)
        request.stop(choice, token_offset)
        if is_news:
            self._outbox.stop(engine_pb2.Stopped(handle=request.handle, choice=choice, token_offset=token_offset))


def _known(request: EngineRequest, choice: int) -> int:
    """`choice`, or InvalidArgument where the request has no such one."""
    if choice >= request.num_choices:
        raise InvalidArgument.field("choice", f"is {choice}; request {request.request_id} has {request.num_choices}")
    return choice
