"""GET /metrics on a listener of its own: Prometheus' client writes the answer, Python's own HTTP server carries it.

The event loop only takes connections in; each is read and answered on a thread of its own, which asks the loop for what the loop
owns (`metrics.OnLoop`). One answer per connection. With certificates, who scrapes must show one that their CA signed.
"""

import asyncio
import logging
import socket
import ssl
from collections.abc import Callable, Iterable
from concurrent.futures import CancelledError
from socketserver import ThreadingMixIn
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

from prometheus_client import CollectorRegistry, make_wsgi_app

from svc_common.listening import listen

log = logging.getLogger(__name__)

PATH = "/metrics"
OPTION = "--metrics-port"
_CLIENT_TIMEOUT_S = 10.0

Environ = dict[str, Any]
StartResponse = Callable[..., Any]


class MetricsServer:
    """Serves one registry from `start` to `close`, both on the event loop."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._app = _MetricsApp(registry)
        self._server: _Server | None = None
        self._loop = asyncio.get_running_loop()

    def start(self, host: str, port: int, tls: ssl.SSLContext | None) -> str:
        """Listens (0 = any free port); HOST:PORT. `tls`: None = plain text. ConfigError naming --metrics-port when it is taken."""
        sock = listen(host, port, option=OPTION)
        self._server = _Server(sock, self._app, tls)
        self._loop.add_reader(sock, self._server.handle_request)
        return f"{host}:{sock.getsockname()[1]}"

    def close(self) -> None:
        """No new connections. Idempotent, also before `start`."""
        if self._server is not None:
            self._loop.remove_reader(self._server.socket)
            self._server.server_close()
            self._server = None


class _MetricsApp:
    """WSGI: the library's application, at one path."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._answer = make_wsgi_app(registry)

    def __call__(self, environ: Environ, start_response: StartResponse) -> Iterable[bytes]:
        """404 beside the path; 503 while the event loop does not answer, or when the service is on its way out."""

        def start(status: str, headers: list[tuple[str, str]]) -> Any:
            return start_response(status, [*headers, ("Server", "quire")])

        if environ["PATH_INFO"] != PATH:
            return _plain(start, "404 Not Found", f"metrics are at {PATH}")
        try:
            answered: Iterable[bytes] = self._answer(environ, start)
        except (TimeoutError, CancelledError, RuntimeError) as error:
            log.warning("metrics cannot be read: %s", type(error).__name__)
            return _plain(start, "503 Service Unavailable", "the service does not answer at the moment")
        return answered


def _plain(start_response: StartResponse, status: str, text: str) -> list[bytes]:
    body = f"{text}\n".encode()
    start_response(status, [("Content-Type", "text/plain; charset=utf-8"), ("Content-Length", str(len(body)))])
    return [body]


class _Handler(WSGIRequestHandler):
    """One connection; what it asks for is no news."""

    timeout = _CLIENT_TIMEOUT_S

    def log_message(self, format: str, *args: Any) -> None:
        """See BaseHTTPRequestHandler."""
        log.debug("metrics asked for: %s", args[1] if len(args) > 1 else "")


class _Server(ThreadingMixIn, WSGIServer):
    """On a socket that listens already; `handle_request` whenever it can be read."""

    daemon_threads = True
    timeout = 0

    def __init__(self, sock: socket.socket, app: _MetricsApp, tls: ssl.SSLContext | None) -> None:
        super().__init__(sock.getsockname()[:2], _Handler, bind_and_activate=False)
        self.socket.close()
        self.socket = sock
        # Who connects and goes at once must not hold the loop up.
        self.socket.setblocking(False)
        self._tls = tls
        # The library would look its own name up here, which may take seconds.
        self.server_name, self.server_port = sock.getsockname()[:2]
        self.setup_environ()
        self.set_app(app)

    def get_request(self) -> tuple[socket.socket, Any]:
        """The next connection; with certificates the handshake follows on the connection's thread."""
        connection, address = self.socket.accept()
        connection.setblocking(True)
        if self._tls is None:
            return connection, address
        return self._tls.wrap_socket(connection, server_side=True, do_handshake_on_connect=False), address

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that left, or that showed no certificate."""
        log.debug("a scrape ended early", exc_info=True)
