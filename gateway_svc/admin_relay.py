"""AdminService on the gateway's own listener, relayed to the scheduler's as raw bytes, so that every method works."""

import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable

import grpc
import grpc.aio
from google.protobuf.descriptor import MethodDescriptor

from protos.inference.v1 import admin_pb2
from svc_common.errors import Unavailable
from svc_common.net import rpc

SERVICE = admin_pb2.DESCRIPTOR.services_by_name["AdminService"]
SERVICE_NAME = SERVICE.full_name

_LOAD_ADAPTER = SERVICE.methods_by_name["LoadAdapter"]
_UNSPECIFIED_HOSTS = frozenset({"", "0.0.0.0", "[::]", "::"})
_Context = grpc.aio.ServicerContext


class AdminRelay:
    """Relay with its channel to the scheduler's AdminService.

    `address()`: the address in Welcome, empty while unknown. If the scheduler reports an unspecified host (it
    listens on all interfaces), the host of `scheduler()` is used instead. `connect(address)` returns a channel.
    `until_adapter(name)` waits until this gateway knows a loaded adapter, so that requests may name it as
    soon as LoadAdapter has answered.
    """

    def __init__(
        self,
        address: Callable[[], str],
        scheduler: Callable[[], str],
        connect: Callable[[str], grpc.aio.Channel] = rpc.channel,
        until_adapter: Callable[[str], Awaitable[None]] | None = None,
    ) -> None:
        self._address = address
        self._scheduler = scheduler
        self._connect = connect
        self._until_adapter = until_adapter
        self._channel: grpc.aio.Channel | None = None
        self._connected_to = ""

    def handler(self) -> grpc.GenericRpcHandler:
        """Return the handler for `server.add_generic_rpc_handlers`."""
        return grpc.method_handlers_generic_handler(
            SERVICE_NAME, {method.name: self._method_handler(method) for method in SERVICE.methods}
        )

    async def close(self) -> None:
        """Close the channel, ending calls in flight."""
        if self._channel is not None:
            await self._channel.close(None)

    def _method_handler(self, method: MethodDescriptor) -> grpc.RpcMethodHandler:
        path = f"/{SERVICE_NAME}/{method.name}"

        async def unary(raw: bytes, context: _Context) -> bytes:
            async with _typed_errors(context):
                channel = await self.connected()
                answer: bytes = await channel.unary_unary(path, None, None)(raw, timeout=context.time_remaining())
                if method is _LOAD_ADAPTER and self._until_adapter is not None:
                    await self._until_adapter(admin_pb2.LoadAdapterResponse.FromString(answer).adapter.name)
                return answer
            raise AssertionError("an error ends the call")

        async def stream(raw: bytes, context: _Context) -> None:
            async with _typed_errors(context):
                channel = await self.connected()
                call = channel.unary_stream(path, None, None)(raw, timeout=context.time_remaining())
                try:
                    async for message in call:
                        await context.write(message)
                finally:
                    call.cancel()

        if method.server_streaming:
            return grpc.unary_stream_rpc_method_handler(stream)
        return grpc.unary_unary_rpc_method_handler(unary)

    async def connected(self) -> grpc.aio.Channel:
        """Return a channel to the scheduler's current address. Raises Unavailable before it was reached."""
        address = self._reachable(self._address())
        if self._channel is None or address != self._connected_to:
            await self.close()
            self._channel, self._connected_to = self._connect(address), address
        return self._channel

    def _reachable(self, address: str) -> str:
        if not address:
            raise Unavailable("the scheduler has not been reached yet", reason="SCHEDULER_AWAY", retry_after_s=1.0)
        host, _, port = address.rpartition(":")
        return f"{self._scheduler().rpartition(':')[0]}:{port}" if host in _UNSPECIFIED_HOSTS else address


@contextlib.asynccontextmanager
async def _typed_errors(context: _Context) -> AsyncIterator[None]:
    """Pass the scheduler's error on unchanged."""
    async with rpc.errors_to_status(context):
        try:
            yield
        except grpc.aio.AioRpcError as error:
            raise rpc.from_rpc_error(error) from None
