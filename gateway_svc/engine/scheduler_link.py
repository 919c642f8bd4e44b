"""Gateway stream to the scheduler: all requests multiplexed by handle, reconnecting when it breaks.

At most one write is outstanding; it carries everything new since the last. Requests survive while the
scheduler is away: after the next Welcome each is resubmitted under its handle with the tokens it has. A
scheduler that still holds the request attaches to it, any other continues from those tokens. Detokenisation
is in `generation`, models are in `model_catalog`.
"""

import asyncio
import contextlib
import logging
import random
import uuid
from collections.abc import AsyncGenerator, Callable, Coroutine
from dataclasses import dataclass
from typing import Any

import grpc
import grpc.aio

from gateway_svc.engine.admission import GatewayCapacity
from gateway_svc.engine.outbox import Outbox
from gateway_svc.engine.request_table import RequestTable
from gateway_svc.requests.engine_request import EngineRequest
from gateway_svc.requests.submission_spans import SubmissionSpans
from gateway_svc.settings import GatewaySettings
from protos.common.v1 import common_pb2
from protos.engine.v1 import engine_pb2, engine_pb2_grpc
from svc_common import wire_arrays
from svc_common.clock import NS_PER_S, monotonic_ns
from svc_common.errors import Aborted, QuireError, Unavailable
from svc_common.net import rpc
from svc_common.tenant_load import Load, TenantLoad

log = logging.getLogger(__name__)

MIN_BACKOFF_S = 0.05
MAX_BACKOFF_S = 0.25
WELCOME_TIMEOUT_S = 10.0
GOODBYE_TIMEOUT_S = 1.0
BUNDLE_TIMEOUT_S = 60.0
RETRY_AFTER_S = 1.0


@dataclass(slots=True)
class LinkState:
    """Last state reported by the scheduler.

    `limits`: model and limits, None until known. `reason`: why it is not serving, for people. `warming`: not
    serving yet, but a worker is loading. `adapters`: names that may be used besides the model's.
    """

    attached: bool = False
    serving: bool = False
    warming: bool = False
    reason: str = "the scheduler has not been reached yet"
    limits: common_pb2.ModelLimits | None = None
    admin_address: str = ""
    adapters: tuple[str, ...] = ()


class SchedulerLink:
    """The stream and its state. Works only while `run()` runs; `on_state` is called after each change of `state`.

    `scheduler`: its address as people gave it. `live`: requests of this gateway, at all its schedulers.
    """

    def __init__(
        self,
        settings: GatewaySettings,
        scheduler: str,
        identity: rpc.Identity,
        channel: grpc.aio.Channel,
        live: TenantLoad,
    ) -> None:
        self._settings = settings
        self._scheduler = scheduler
        self._identity = identity
        self._stub = engine_pb2_grpc.EngineServiceStub(channel)  # type: ignore[no-untyped-call]
        self._frontend_id = uuid.uuid4().hex
        self._outbox = Outbox()
        self._closing = False
        self._left = asyncio.Event()
        self._moved = asyncio.Event()
        self.requests = RequestTable(self._outbox, settings.max_buffered_tokens)
        self.admission = GatewayCapacity(settings, live)
        self.state = LinkState()
        self.on_state: Callable[[], None] = lambda: None

    # --- for the generator -------------------------------------------------------------------------------------------

    def submit(
        self,
        submit: engine_pb2.Submit,
        deadline_ns: int,
        *,
        returns_partial: bool = False,
        spans: SubmissionSpans | None = None,
    ) -> EngineRequest:
        """Submit a request and fill in its handle; the caller must call `requests.release` in the end.

        `returns_partial`: at its deadline the request ends with the output so far. `spans`: trace spans of
        the submission, None if not traced. Raises AlreadyExists if its id is live here, and Unavailable when
        stopping or if too many wait for an absent scheduler.
        """
        self._check_open(submit)
        request = self.requests.add(submit, deadline_ns, returns_partial=returns_partial, spans=spans)
        self._hand_over(request)
        return request

    def _hand_over(self, request: EngineRequest) -> None:
        self._outbox.submit(request)
        if not self.state.attached:
            request.wait_for_scheduler(self.state.reason)

    def attach(
        self, tenant: str, request_id: str, deadline_ns: int, *, spans: SubmissionSpans | None = None
    ) -> EngineRequest:
        """Resume a resumable request from any gateway; see `submit`. Its contents are known once it is `accepted`."""
        named = engine_pb2.Submit(request_id=request_id, tenant=tenant, resumable=True)
        self._check_open(named)
        request = self.requests.add(named, deadline_ns, is_attaching=True, spans=spans)
        self._hand_over(request)
        return request

    def _check_open(self, submit: engine_pb2.Submit) -> None:
        if self._closing:
            raise _stopping()
        if self.state.attached:
            return
        limit = Load(self._settings.max_waiting_requests, self._settings.max_waiting_tokens)
        num_tokens = len(submit.token_ids) // wire_arrays.I32.itemsize
        if not self._outbox.has_room(submit.tenant, num_tokens, limit):
            raise self._away()

    def cancel(self, tenant: str, request_id: str, error: QuireError) -> None:
        """Cancel by public id.

        A request of this gateway ends with `error`; otherwise the scheduler is asked to cancel it.
        """
        request = self.requests.find(tenant, request_id)
        if request is not None:
            self.requests.end(request, error)
        else:
            self._outbox.cancel(engine_pb2.Cancel(request_id=request_id, tenant=tenant))

    async def fetch_bundle(self, digest: str) -> bytes:
        """Fetch the serialised model bundle; raises a QuireError if the scheduler does not return it."""
        try:
            call = self._stub.GetModelBundle(engine_pb2.GetModelBundleRequest(digest=digest), timeout=BUNDLE_TIMEOUT_S)
            return b"".join([piece.chunk async for piece in call])
        except grpc.aio.AioRpcError as error:
            raise rpc.from_rpc_error(error) from None

    async def kv_events(self) -> AsyncGenerator[engine_pb2.SubscribeKvEventsResponse, None]:
        """Changes of the stored KV blocks; raises a QuireError if the scheduler does not tell of them."""
        try:
            async for change in self._stub.SubscribeKvEvents(engine_pb2.SubscribeKvEventsRequest()):
                yield change
        except grpc.aio.AioRpcError as error:
            raise rpc.from_rpc_error(error) from None

    def close(self) -> None:
        """Accept no more requests; running ones go on."""
        self._closing = True

    def move(self) -> None:
        """End the stream, and open the next one over the channel as it is now."""
        self._moved.set()

    async def leave(self) -> None:
        """Say goodbye to the scheduler and end the remaining requests here.

        On the goodbye the scheduler cancels them at once. Resumable requests go on and can be read at another
        gateway.
        """
        self.close()
        for request in self.requests:
            if request.submit.resumable:
                self.requests.leave(request, _stopping())
        if self.state.attached:
            self._outbox.say_goodbye()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(GOODBYE_TIMEOUT_S):
                    await self._left.wait()
        for request in self.requests:
            request.fail(_stopping())

    # --- the stream --------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Keep the link up until cancelled or until `leave` is done."""
        backoff_s, away_since_ns = MIN_BACKOFF_S, monotonic_ns()
        while True:
            error = await self._attach()
            if self._outbox.said_goodbye:
                self._left.set()
                return
            if self.state.attached:
                backoff_s, away_since_ns = MIN_BACKOFF_S, monotonic_ns()
            self._set_away(error)
            if monotonic_ns() - away_since_ns > self._settings.scheduler_away_s * NS_PER_S:
                self._give_up_waiting()
            await asyncio.sleep(backoff_s * random.uniform(0.5, 1.0))
            backoff_s = min(2 * backoff_s, MAX_BACKOFF_S)

    async def _attach(self) -> Exception:
        """Run one stream; return the error that ended it."""
        self._moved.clear()
        stream, welcomed = self._stub.Attach(), asyncio.Event()
        try:
            return _cause(
                await _failures(
                    self._until_moved(), self._write_all(stream, welcomed), self._read_all(stream, welcomed)
                )
            )
        finally:
            stream.cancel()

    async def _until_moved(self) -> None:
        await self._moved.wait()
        raise Aborted("it is not at this address any more", reason="STREAM_CLOSED")

    def _welcome(self, welcome: engine_pb2.Welcome) -> None:
        self._identity.agree(welcome.identity, "the scheduler")
        detached = self._outbox.detached
        self._outbox.forget_stream()
        self.requests.resume({held.handle for held in welcome.held}, detached)
        limits = welcome.limits if welcome.HasField("limits") else None
        self.state = LinkState(attached=True, limits=limits, admin_address=welcome.admin_address)
        self.admission.hear(welcome.queue)
        self._set_service(welcome.state)

    async def _write_all(self, stream: "grpc.aio.StreamStreamCall[Any, Any]", welcomed: asyncio.Event) -> None:
        hello = engine_pb2.FrontendHello(identity=self._identity.message(), frontend_id=self._frontend_id)
        await stream.write(engine_pb2.FrontendMessage(hello=hello))
        await welcomed.wait()
        while not self._outbox.said_goodbye:
            await self._outbox.filled.wait()
            await stream.write(self._outbox.take())
        await stream.done_writing()

    async def _read_all(self, stream: "grpc.aio.StreamStreamCall[Any, Any]", welcomed: asyncio.Event) -> None:
        async with asyncio.timeout(WELCOME_TIMEOUT_S):
            first = await stream.read()
        self._welcome(_message(first).welcome)
        welcomed.set()
        while True:
            message = _message(await stream.read())
            self.requests.receive(message)
            if message.HasField("state"):
                self._set_service(message.state)
            if message.HasField("queue"):
                self.admission.hear(message.queue)

    # --- state of the scheduler --------------------------------------------------------------------------------------

    def _set_service(self, state: engine_pb2.ServiceState) -> None:
        self.state.serving, self.state.warming, self.state.reason = state.serving, state.warming, state.reason
        self.state.adapters = tuple(state.adapters)
        if state.HasField("limits"):
            self.state.limits = state.limits
        self.on_state()

    def _set_away(self, error: Exception) -> None:
        known = rpc.from_rpc_error(error) if isinstance(error, grpc.RpcError) else error
        reason = f"the scheduler at {self._scheduler} cannot be used: {known or 'it does not answer'}"
        if reason != self.state.reason:
            expected = isinstance(error, (QuireError, grpc.RpcError, TimeoutError))
            log.warning("%s", reason, exc_info=None if expected else error)
        self.state = LinkState(reason=reason, limits=self.state.limits, adapters=self.state.adapters)
        self.admission.forget()
        for request in self.requests:
            request.wait_for_scheduler(reason)
        self.on_state()

    def _away(self) -> Unavailable:
        return Unavailable(self.state.reason, reason="SCHEDULER_AWAY", retry_after_s=RETRY_AFTER_S)

    def _give_up_waiting(self) -> None:
        for request in self.requests:
            self.requests.end(request, self._away())


def _stopping() -> Unavailable:
    return Unavailable("this gateway is stopping", reason="DRAINING", retry_after_s=RETRY_AFTER_S)


def _message(read: object) -> engine_pb2.EngineMessage:
    if not isinstance(read, engine_pb2.EngineMessage):  # grpc.aio.EOF
        raise Aborted("it closed the stream", reason="STREAM_CLOSED")
    return read


async def _failures(*parts: Coroutine[Any, Any, None]) -> list[Exception]:
    """Run them until one fails, end the others, and return the errors of those that failed.

    No TaskGroup: before Python 3.13 one that fails forgets that it was cancelled, and the link would go on.
    """
    tasks = [asyncio.ensure_future(part) for part in parts]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
    finally:
        for task in tasks:
            task.cancel()
        ended = await asyncio.gather(*tasks, return_exceptions=True)
    return [error for error in ended if isinstance(error, Exception)]


def _cause(errors: list[Exception]) -> Exception:
    """Choose the more telling error: the reading task knows why a stream ended, the writing one only that it did."""
    known = [error for error in errors if isinstance(error, (QuireError, grpc.RpcError))]
    return (known or errors)[0]
