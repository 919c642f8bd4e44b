"""A relay of plain grpc.aio, a lower bound for any gateway: one incoming stream is copied to all others.

    python -m benchmarks.relay.bare 256    # for this many readers; prints its address

Uses the options of the gateway's own server and its way of writing: one task per stream, one message in
flight.
"""

import asyncio
from typing import Any

import grpc
import grpc.aio
import typer

from svc_common import garbage
from svc_common.net import rpc
from svc_common.signals import stop_on_signals

SERVICE = "benchmarks.Bare"
READ, FEED = f"/{SERVICE}/Read", f"/{SERVICE}/Feed"


class BareRelay:
    """One queue per stream for `num_readers` streams."""

    def __init__(self, num_readers: int) -> None:
        self._num_readers = num_readers
        self._all_here = asyncio.Event()
        self._queues: list[asyncio.Queue[bytes]] = []

    def handler(self) -> grpc.GenericRpcHandler:
        """The handler for `server.add_generic_rpc_handlers`."""
        methods = {
            "Read": grpc.unary_stream_rpc_method_handler(self.read),
            "Feed": grpc.stream_unary_rpc_method_handler(self.feed),
        }
        return grpc.method_handlers_generic_handler(SERVICE, methods)

    async def read(self, raw: bytes, context: Any) -> None:
        """Write fed messages until an empty one."""
        queue: asyncio.Queue[bytes] = asyncio.Queue()
        self._queues.append(queue)
        if len(self._queues) == self._num_readers:
            self._all_here.set()
        while message := await queue.get():
            await context.write(message)

    async def feed(self, messages: Any, context: Any) -> bytes:
        """Forward messages once all readers are connected."""
        await self._all_here.wait()
        async for message in messages:
            for queue in self._queues:
                queue.put_nowait(message)
        for queue in self._queues:
            queue.put_nowait(b"")
        return b""


async def serve(num_readers: int) -> None:
    """Serve until SIGTERM."""
    server = rpc.server(public=True)
    server.add_generic_rpc_handlers((BareRelay(num_readers).handler(),))
    port = rpc.bind(server, "127.0.0.1", 0, option="")
    await server.start()
    stop = asyncio.Event()
    with stop_on_signals(stop):
        print(f"service bare address=127.0.0.1:{port}", flush=True)
        garbage.settle()
        await stop.wait()
    await server.stop(0)


def main(readers: int) -> None:
    """Runs the bare server of the relay benchmark."""
    asyncio.run(serve(readers))


if __name__ == "__main__":
    typer.run(main)
