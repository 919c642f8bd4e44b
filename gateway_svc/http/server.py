"""uvicorn in our event loop, on our own socket, without its signal handlers, with limits for its connections."""

import asyncio
import contextlib
import functools
import socket
import ssl
from collections.abc import Coroutine, Iterator
from typing import Any

import uvicorn
from starlette.types import ASGIApp

from gateway_svc.http.connection import BoundedConnection, PeerConnections
from gateway_svc.settings import HttpLimits
from svc_common.net.listening import listen


class HttpServer(uvicorn.Server):
    """Serves one application until `stop`; signals are handled by the composition root. `tls`: None = plain text.

    Closes the socket made by `bind` in `close`.
    """

    def __init__(
        self, app: ASGIApp, grace_s: float, tls: ssl.SSLContext | None = None, limits: HttpLimits | None = None
    ) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                lifespan="off",
                http="h11",
                ws="none",
                access_log=False,
                log_config=None,
                server_header=False,
                timeout_graceful_shutdown=max(1, round(grace_s)),
            )
        )
        self.config.load()
        self.config.ssl = tls
        self._limits = limits or HttpLimits()
        self._bound: socket.socket | None = None

    def bind(self, host: str, port: int, *, option: str) -> int:
        """Start listening and return the port. Raises ConfigError naming `option` if it is taken."""
        self._bound = listen(host, port, option=option)
        return int(self._bound.getsockname()[1])

    def run_bound(self) -> Coroutine[Any, Any, None]:
        """Serve until `stop`, then for a grace time for open connections."""
        assert self._bound is not None
        return self.serve([self._bound])

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Accept connections on `sockets`, each within the limits."""
        make = functools.partial(
            BoundedConnection,
            self._limits,
            PeerConnections(self._limits.connections_per_peer),
            self.config,
            server_state=self.server_state,
            app_state=self.lifespan.state,
        )
        tls = self.config.ssl
        self.servers = [
            await asyncio.get_running_loop().create_server(
                make,
                sock=sock,
                ssl=tls,
                backlog=self.config.backlog,
                ssl_handshake_timeout=self._limits.header_s if tls else None,
            )
            for sock in sockets or []
        ]
        self.started = True

    def close(self) -> None:
        """Free the port."""
        if self._bound is not None:
            self._bound.close()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Capture no signals."""
        yield

    def stop(self) -> None:
        """Accept no new connections; `serve` returns when open ones are done, or after the grace time."""
        self.should_exit = True
