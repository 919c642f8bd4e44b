"""What the engine contracts of others share: what their methods use, and what surrounds each call of one.

Methods take raw bytes and parse them inside, as those of InferenceService.
"""

import contextlib
import functools
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import grpc
import grpc.aio
from google.protobuf.message import Message

from gateway_svc.calls import Call, CallIntake
from gateway_svc.cell.cell_load import CellLoad
from gateway_svc.generating.embedder import Embedder
from gateway_svc.generating.generator import Generator
from gateway_svc.generating.model_catalog import ModelCatalog
from gateway_svc.grpc_calls import OpenCall, initial_metadata, metadata_of
from gateway_svc.metrics import GatewayMetrics
from gateway_svc.request_ids import accept_request_id
from gateway_svc.spans import CallSpans
from gateway_svc.stalled_clients import until_left_unread
from protos.engine.v1 import engine_pb2
from svc_common.errors import Cancelled, QuireError
from svc_common.net import rpc

UNENDING = frozenset({"SubscribeKvEvents"})

UnaryMethod = Callable[[bytes, Call], Awaitable[Message]]
StreamingMethod = Callable[[bytes, Call], AsyncGenerator[Message, None]]
ReadMetadata = Callable[[Sequence[tuple[str, str]], Call], Call]
"""Takes a call's metadata, with repeated keys, and the call; returns the call as they want it."""
_Context = grpc.aio.ServicerContext[Any, Any]


class FailureTold(Exception):
    """The last message of a stream told its error: the call counts as failed, and its status is OK."""

    def __init__(self, error: QuireError) -> None:
        super().__init__(str(error))
        self.error = error


@dataclass(frozen=True, slots=True)
class EngineParts:
    """What the methods use, owned by others.

    `cancel(tenant, request_id, error)` ends a request at whichever gateway it runs; `fetch_bundle(digest)` returns a
    serialised model bundle; `kv_events()`: changes of the stored KV blocks; `not_ready_because()`: empty if requests can be
    served.
    """

    generator: Generator
    embedder: Embedder
    catalog: ModelCatalog
    cell: CellLoad
    cancel: Callable[[str, str, QuireError], None]
    fetch_bundle: Callable[[str], Awaitable[bytes]]
    kv_events: Callable[[], AsyncGenerator[engine_pb2.SubscribeKvEventsResponse, None]]
    not_ready_because: Callable[[], str]

    def abort(self, tenant: str, request_id: str) -> None:
        """Cancel by id, here or at another gateway; an unknown id is no error."""
        self.cancel(tenant, request_id, Cancelled("the request was aborted by its id", reason="CANCELLED"))


class EngineCalls:
    """Makes the handler of one service from its methods: span, count, typed errors, metadata in and out.

    `read_metadata`: what the contract has besides the metadata that all calls have.
    """

    def __init__(
        self,
        service: str,
        intake: CallIntake,
        call_spans: CallSpans,
        metrics: GatewayMetrics,
        read_metadata: ReadMetadata = lambda pairs, call: call,
    ) -> None:
        self._service = service
        self._intake = intake
        self._spans = call_spans
        self._metrics = metrics
        self._read_metadata = read_metadata

    def handler(
        self, unary: Mapping[str, UnaryMethod], streaming: Mapping[str, StreamingMethod]
    ) -> "grpc.GenericRpcHandler[Any, Any]":
        """Return the handler for `server.add_generic_rpc_handlers`."""
        handlers = {
            name: grpc.unary_unary_rpc_method_handler(functools.partial(self._answer, name, method), None, _serialize)
            for name, method in unary.items()
        }
        handlers |= {
            name: grpc.unary_stream_rpc_method_handler(functools.partial(self._stream, name, method), None, _serialize)
            for name, method in streaming.items()
        }
        return grpc.method_handlers_generic_handler(self._service, handlers)

    async def _answer(self, name: str, method: UnaryMethod, raw: bytes, context: _Context) -> Message:
        async with rpc.errors_to_status(context):
            with self._open(name, context) as opened:
                call = self._accept(opened, context, stream=False)
                async with until_left_unread(call):
                    return await method(raw, call)
        raise AssertionError("an error ends the call")

    async def _stream(self, name: str, method: StreamingMethod, raw: bytes, context: _Context) -> None:
        async with rpc.errors_to_status(context):
            with self._open(name, context) as opened:
                call = self._accept(opened, context, stream=True)
                limit = contextlib.nullcontext() if name in UNENDING else until_left_unread(call)
                async with limit, contextlib.aclosing(method(raw, call)) as messages:
                    try:
                        await _write_all(messages, call, context)
                    except FailureTold as told:
                        opened.fail(told.error)

    def _accept(self, opened: OpenCall, context: _Context, *, stream: bool) -> Call:
        pairs: Any = context.invocation_metadata() or ()
        return self._read_metadata(pairs, opened.accept(self._intake, context, stream=stream))

    def _open(self, name: str, context: _Context) -> OpenCall:
        return OpenCall(name, self._spans.grpc(f"{self._service}/{name}", metadata_of(context)), self._metrics)


def named(call: Call, request_id: str) -> Call:
    """`call` under the id in the message, by which Abort names it."""
    return replace(call, request_id=accept_request_id(request_id, "request_id"), is_named=True) if request_id else call


async def _write_all(messages: AsyncIterator[Message], call: Call, context: _Context) -> None:
    has_begun = False
    async for message in messages:
        if not has_begun:
            await context.send_initial_metadata(initial_metadata(call.request_id, call.span))
            has_begun = True
        await context.write(message)


def _serialize(message: Message) -> bytes:
    return message.SerializeToString()
