"""AdminService on the gateway's own listener, relayed to the scheduler's as raw bytes, so that every method works."""

import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import grpc
import grpc.aio
from google.protobuf.descriptor import MethodDescriptor

from protos.inference.v1 import admin_pb2
from svc_common.net import rpc

SERVICE = admin_pb2.DESCRIPTOR.services_by_name["AdminService"]
SERVICE_NAME = SERVICE.full_name

_LOAD_ADAPTER = SERVICE.methods_by_name["LoadAdapter"]
_Context = grpc.aio.ServicerContext[Any, Any]


class AdminRelay:
    """Handlers that call the scheduler's AdminService over the channel that `connected()` returns.

    `until_adapter(name)` waits until this gateway knows a loaded adapter, so that requests may name it as
    soon as LoadAdapter has answered.
    """

    def __init__(
        self, connected: Callable[[], Awaitable[grpc.aio.Channel]], until_adapter: Callable[[str], Awaitable[None]]
    ) -> None:
        self._connected = connected
        self._until_adapter = until_adapter

    def handler(self) -> "grpc.GenericRpcHandler[Any, Any]":
        """Return the handler for `server.add_generic_rpc_handlers`."""
        return grpc.method_handlers_generic_handler(
            SERVICE_NAME, {method.name: self._method_handler(method) for method in SERVICE.methods}
        )

    def _method_handler(self, method: MethodDescriptor) -> "grpc.RpcMethodHandler[Any, Any]":
        path = f"/{SERVICE_NAME}/{method.name}"

        async def unary(raw: bytes, context: _Context) -> bytes:
            async with _typed_errors(context):
                channel = await self._connected()
                answer: bytes = await channel.unary_unary(path, None, None)(raw, timeout=context.time_remaining())
                if method is _LOAD_ADAPTER:
                    await self._until_adapter(admin_pb2.LoadAdapterResponse.FromString(answer).adapter.name)
                return answer
            raise AssertionError("an error ends the call")

        async def stream(raw: bytes, context: _Context) -> None:
            async with _typed_errors(context):
                channel = await self._connected()
                call = channel.unary_stream(path, None, None)(raw, timeout=context.time_remaining())
                try:
                    async for message in call:
                        await context.write(message)
                finally:
                    call.cancel()

        if method.server_streaming:
            return grpc.unary_stream_rpc_method_handler(stream)
        return grpc.unary_unary_rpc_method_handler(unary)


@contextlib.asynccontextmanager
async def _typed_errors(context: _Context) -> AsyncIterator[None]:
    """Pass the scheduler's error on unchanged."""
    async with rpc.errors_to_status(context):
        try:
            yield
        except grpc.aio.AioRpcError as error:
            raise rpc.from_rpc_error(error) from None
