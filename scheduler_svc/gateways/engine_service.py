"""EngineService: transport of the gateways' streams. `gateway_stream` decides what is written to them."""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator
from typing import Any

import grpc
import grpc.aio

from protos.engine.v1 import engine_pb2, engine_pb2_grpc
from scheduler_svc.gateways.gateway_stream import AttachedGateway, GatewayStream
from scheduler_svc.gateways.gateway_table import GatewayTable
from scheduler_svc.gateways.output_messages import held_message, kv_message
from scheduler_svc.observe.kv_events import KvEvents
from scheduler_svc.readiness import Readiness
from scheduler_svc.requests.value_store import ValueStore
from svc_common.errors import InvalidArgument, NotFound, Unavailable
from svc_common.net import rpc

log = logging.getLogger(__name__)

BUNDLE_CHUNK_BYTES = 2**20
MAX_FRONTEND_ID_LENGTH = 128
FLUSH_S = 1.0
"""Time after which a loss of memory shows that no step follows."""


class EngineServicer(engine_pb2_grpc.EngineServiceServicer):
    """The service's methods. `admin_address`: HOST:PORT sent to gateways."""

    def __init__(
        self,
        gateways: GatewayTable,
        values: ValueStore,
        readiness: Readiness,
        kv_events: KvEvents,
        identity: rpc.Identity,
        admin_address: str,
    ) -> None:
        self._gateways = gateways
        self._values = values
        self._readiness = readiness
        self._kv_events = kv_events
        self._identity = identity
        self._admin_address = admin_address

    async def Attach(
        self, request_iterator: AsyncIterator[engine_pb2.FrontendMessage], context: grpc.aio.ServicerContext[Any, Any]
    ) -> AsyncIterator[engine_pb2.EngineMessage]:
        """Serve one gateway's stream: at most one outstanding write, with everything new in each message."""
        async with rpc.errors_to_status(context):
            hello = await _read_hello(request_iterator, self._identity)
            gateway, stream = self._gateways.attach(hello.frontend_id)
            reader = asyncio.create_task(_read(request_iterator, gateway, stream))
            try:
                yield self._welcome(gateway)
                while True:
                    await stream.wake.wait()
                    stream.wake.clear()
                    if stream.error is not None:
                        raise stream.error
                    if stream.over:
                        return
                    message = gateway.collect()
                    if message is not None:
                        yield message
            finally:
                reader.cancel()
                self._gateways.detach(gateway, stream)

    async def GetModelBundle(
        self, request: engine_pb2.GetModelBundleRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> AsyncIterator[engine_pb2.GetModelBundleResponse]:
        """Stream the worker's model bundle in chunks."""
        async with rpc.errors_to_status(context):
            limits, bundle = self._readiness.limits, self._readiness.bundle
            if limits is None:
                raise Unavailable(
                    f"no model bundle yet: {self._readiness.reason}", reason="NO_WORKER", retry_after_s=1.0
                )
            if request.digest not in {"", limits.bundle_digest}:
                raise NotFound(
                    f"model bundle {request.digest} is not served here; {limits.bundle_digest} is",
                    reason="BUNDLE_DIGEST",
                    metadata={"wanted": request.digest, "served": limits.bundle_digest},
                    resource_type="model bundle",
                    resource_name=request.digest,
                )
            for start in range(0, len(bundle), BUNDLE_CHUNK_BYTES):
                yield engine_pb2.GetModelBundleResponse(chunk=bundle[start : start + BUNDLE_CHUNK_BYTES])

    async def PutValue(
        self, request: engine_pb2.PutValueRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> engine_pb2.PutValueResponse:
        """Keep a value."""
        async with rpc.errors_to_status(context):
            return engine_pb2.PutValueResponse(kept=self._values.put(request.tenant, request.key, request.value))

    async def GetValue(
        self, request: engine_pb2.GetValueRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> engine_pb2.GetValueResponse:
        """Return a kept value."""
        async with rpc.errors_to_status(context):
            return engine_pb2.GetValueResponse(value=self._values.get(request.tenant, request.key))

    async def DeleteValue(
        self, request: engine_pb2.DeleteValueRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> engine_pb2.DeleteValueResponse:
        """Drop a kept value."""
        async with rpc.errors_to_status(context):
            return engine_pb2.DeleteValueResponse(deleted=self._values.delete(request.tenant, request.key))

    async def SubscribeKvEvents(
        self, request: engine_pb2.SubscribeKvEventsRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> AsyncIterator[engine_pb2.SubscribeKvEventsResponse]:
        """Stream which blocks are stored; each message has what is new since the transport took the one before."""
        async with rpc.errors_to_status(context):
            subscription = self._kv_events.subscribe()
            try:
                yield kv_message(subscription.take())
                while not subscription.is_over:
                    with contextlib.suppress(TimeoutError):
                        await asyncio.wait_for(subscription.wake.wait(), FLUSH_S)
                    self._kv_events.flush()
                    if subscription.wake.is_set() and not subscription.is_over:
                        yield kv_message(subscription.take())
                if subscription.error is not None:
                    raise subscription.error
            finally:
                self._kv_events.unsubscribe(subscription)

    def _welcome(self, gateway: AttachedGateway) -> engine_pb2.EngineMessage:
        held = [held_message(handle, live) for handle, live in gateway.held.items()]
        welcome = engine_pb2.Welcome(
            identity=self._identity.message(),
            limits=self._readiness.limits,
            held=held,
            state=self._readiness.state(),
            admin_address=self._admin_address,
            queue=self._gateways.queue(),
        )
        return engine_pb2.EngineMessage(welcome=welcome)


async def _read_hello(
    messages: AsyncIterator[engine_pb2.FrontendMessage], identity: rpc.Identity
) -> engine_pb2.FrontendHello:
    first = await anext(messages, None)
    if first is None or not first.HasField("hello"):
        raise InvalidArgument.field("hello", "is missing: the first message of a stream carries it")
    hello = first.hello
    identity.agree(hello.identity, "the gateway")
    if not 0 < len(hello.frontend_id) <= MAX_FRONTEND_ID_LENGTH:
        raise InvalidArgument.field("hello.frontend_id", f"must have 1 to {MAX_FRONTEND_ID_LENGTH} characters")
    return hello


async def _read(
    messages: AsyncIterator[engine_pb2.FrontendMessage], gateway: AttachedGateway, stream: GatewayStream
) -> None:
    """Pass a stream's messages to its gateway; its end or a malformed message closes it."""
    try:
        async for message in messages:
            if stream.over:
                return
            gateway.receive(message)
        stream.close()
    except InvalidArgument as error:
        stream.close(error)
    except Exception as error:
        stream.close(rpc.hide(error))
