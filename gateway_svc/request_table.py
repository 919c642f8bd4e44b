"""Live requests of this gateway by handle and by public id, their deadlines, and what the scheduler's messages mean to them."""

import asyncio
import itertools

from gateway_svc.engine_request import CHOICE, EngineRequest
from gateway_svc.outbox import Outbox
from protos.engine.v1 import engine_pb2
from svc_common import columns, rpc
from svc_common.clock import NS_PER_S, monotonic_ns
from svc_common.errors import AlreadyExists, DeadlineExceeded, QuireError, ResourceExhausted

MESSAGES_PER_BACKLOG_CHECK = 64


class RequestTable:
    """Owner of live requests, from `add` to `release`. All calls on the event loop's thread."""

    def __init__(self, outbox: Outbox, max_unread_tokens: int) -> None:
        self._outbox = outbox
        self._max_unread_tokens = max_unread_tokens
        self._handles = itertools.count(1)
        self._by_handle: dict[int, EngineRequest] = {}
        self._by_id: dict[str, EngineRequest] = {}
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
        if submit.request_id in self._by_id:
            raise AlreadyExists(
                f"a request with id {submit.request_id} is running here; use another x-request-id or none",
                reason="REQUEST_ID_IN_USE",
                metadata={"request_id": submit.request_id},
            )
        submit.handle = next(self._handles)
        request = EngineRequest(submit, deadline_ns)
        self._by_handle[submit.handle] = request
        self._by_id[submit.request_id] = request
        delay_s = max(0.0, (deadline_ns - monotonic_ns()) / NS_PER_S)
        self._timers[submit.handle] = asyncio.get_running_loop().call_later(delay_s, self._expire, request)
        return request

    def find(self, request_id: str) -> EngineRequest | None:
        """By public id."""
        return self._by_id.get(request_id)

    def release(self, request: EngineRequest) -> None:
        """Forgets a request; one that is not over is cancelled at the scheduler at once. Idempotent."""
        if self._by_handle.pop(request.handle, None) is None:
            return
        del self._by_id[request.request_id]
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
        for finished in message.finished:
            if (request := self._by_handle.get(finished.handle)) is not None and finished.last:
                self._finish(request, finished)
        for failed in message.failed:
            if (request := self._by_handle.get(failed.handle)) is not None:
                request.fail(rpc.from_error_status(failed.error))
        self._num_messages += 1
        if self._num_messages % MESSAGES_PER_BACKLOG_CHECK == 0:
            self._shed()

    def _receive_tokens(self, tokens: engine_pb2.TokenColumns) -> None:
        handles = columns.unpack(tokens.handles, "tokens.handles", columns.U32)
        offsets = columns.unpack(tokens.token_offsets, "tokens.token_offsets", columns.U32, length=len(handles))
        counts = columns.unpack(tokens.counts, "tokens.counts", columns.U32, length=len(handles))
        total = int(counts.sum())
        token_ids = columns.unpack(tokens.token_ids, "tokens.token_ids", minimum=0, length=total).tolist()
        num_logprobs = total if tokens.logprobs else 0
        logprobs = columns.unpack(tokens.logprobs, "tokens.logprobs", columns.F32, length=num_logprobs).tolist()
        begin = 0
        for handle, offset, count in zip(handles.tolist(), offsets.tolist(), counts.tolist(), strict=True):
            end = begin + count
            request = self._by_handle.get(handle)
            if request is not None and not request.add_tokens(offset, token_ids[begin:end], logprobs[begin:end]):
                self._resync(request)
            begin = end

    def _finish(self, request: EngineRequest, finished: engine_pb2.Finished) -> None:
        if request.stopped_at is None and request.num_received_tokens < finished.num_output_tokens:
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
            if request.stopped_at is None:
                self._outbox.submit(request)
            else:
                self._outbox.cancel(engine_pb2.Cancel(handle=request.handle))
                request.finish_stopped()

    def stop(self, request: EngineRequest, token_offset: int) -> None:
        """A stop string ended the request's choice: `token_offset` tokens count."""
        request.stopped_at = token_offset
        if not request.is_over:
            self._outbox.stop(engine_pb2.Stopped(handle=request.handle, choice=CHOICE, token_offset=token_offset))
