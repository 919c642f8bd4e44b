"""uvicorn in our event loop, on a socket of our own, without signal handlers of its own."""

import contextlib
import socket
import ssl
from collections.abc import Iterator

import uvicorn
from starlette.types import ASGIApp

from svc_common.errors import ConfigError

BACKLOG = 2048


def listen(host: str, port: int, *, option: str) -> socket.socket:
    """A bound socket (port 0 = any free one). ConfigError naming `option` when the port is taken."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        sock.bind((host.strip("[]"), port))
        sock.listen(BACKLOG)
    except OSError as error:
        sock.close()
        raise ConfigError(
            f"port {port} on {host} is in use or not allowed ({error.strerror}); choose another with {option} "
            "(0 = any free port)",
            reason="PORT_IN_USE",
            metadata={"port": str(port)},
        ) from None
    return sock


class HttpServer(uvicorn.Server):
    """Serves one application until `stop`; signals belong to the composition root. `tls`: None = plain text."""

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

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """None are captured."""
        yield

    def stop(self) -> None:
        """No new connections; `serve` returns when those there are done, or after the grace time."""
        self.should_exit = True
