"""uvicorn in our event loop, on a socket of our own, without signal handlers of its own."""

import contextlib
import socket
import ssl
from collections.abc import Iterator

import uvicorn
from starlette.types import ASGIApp

from svc_common.listening import listen


class HttpServer(uvicorn.Server):
    """Serves one application until `stop`; signals belong to the composition root. `tls`: None = plain text.

    Owner of the socket that `bind` made.
    """

    def __init__(self, app: ASGIApp, grace_s: float, tls: ssl.SSLContext | None = None) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                lifespan="off",
                access_log=False,
                log_config=None,
                server_header=False,
                timeout_graceful_shutdown=max(1, round(grace_s)),
            )
        )
        self.config.load()
        self.config.ssl = tls
        self._bound: socket.socket | None = None

    def bind(self, host: str, port: int, *, option: str) -> int:
        """The port that it listens on from now on. ConfigError naming `option` when it is taken."""
        self._bound = listen(host, port, option=option)
        return int(self._bound.getsockname()[1])

    async def run_bound(self) -> None:
        """Serves what comes there until `stop`, and a grace time for those that are there."""
        assert self._bound is not None
        await self.serve([self._bound])

    def close(self) -> None:
        """The port is free again."""
        if self._bound is not None:
            self._bound.close()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """None are captured."""
        yield

    def stop(self) -> None:
        """No new connections; `serve` returns when those there are done, or after the grace time."""
        self.should_exit = True
