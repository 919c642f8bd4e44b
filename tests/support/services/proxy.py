"""A TCP proxy that tests put between two services: it breaks connections, holds bytes back, and can point elsewhere."""

import asyncio
import contextlib
from collections.abc import AsyncIterator


class Proxy:
    """Forwards to `upstream` (HOST:PORT). Owner of its connections."""

    def __init__(self, upstream: str) -> None:
        self.upstream = upstream
        self.address = ""
        self.num_connections = 0
        self._open: set[asyncio.StreamWriter] = set()
        self._flowing = asyncio.Event()
        self._flowing.set()

    def cut(self) -> None:
        """Breaks every connection, as a peer that dies does."""
        for writer in list(self._open):
            writer.transport.abort()

    def hold(self) -> None:
        """Lets no byte through, as a partition does."""
        self._flowing.clear()

    def release(self) -> None:
        """Heals the partition."""
        self._flowing.set()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        host, port = self.upstream.rsplit(":", 1)
        self.num_connections += 1
        try:
            up_reader, up_writer = await asyncio.open_connection(host, int(port))
        except OSError:
            writer.close()
            return
        self._open |= {writer, up_writer}
        await asyncio.gather(self._pump(reader, up_writer), self._pump(up_reader, writer))
        self._open -= {writer, up_writer}

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(65_536):
                await self._flowing.wait()
                writer.write(data)
                await writer.drain()
        writer.close()


@contextlib.asynccontextmanager
async def proxy(upstream: str) -> AsyncIterator[Proxy]:
    """A running proxy."""
    made = Proxy(upstream)
    server = await asyncio.start_server(made._serve, "127.0.0.1", 0)
    made.address = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
    try:
        yield made
    finally:
        server.close()
        made.release()
        made.cut()
        await asyncio.sleep(0)
