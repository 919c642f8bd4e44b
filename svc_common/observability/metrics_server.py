"""GET /metrics on a separate listener: Prometheus' client writes the response, Python's HTTP server carries it.

The event loop only accepts connections. Each is read and answered on its own thread, which asks the loop for
the values that it owns (`metrics.OnLoop`). One response per connection. With certificates, a client must
present one that the CA signed.
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

from svc_common.net.listening import listen

log = logging.getLogger(__name__)

PATH = "/metrics"
OPTION = "--metrics-port"
_CLIENT_TIMEOUT_S = 10.0

Environ = dict[str, Any]
StartResponse = Callable[..., Any]


class MetricsServer:
    """Serves one registry from `start` to `close`, both called on the event loop."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._app = _MetricsApp(registry)
        self._server: _Server | None = None
        self._loop = asyncio.get_running_loop()

    def start(self, host: str, port: int, tls: ssl.SSLContext | None) -> str:
        """Listen and return HOST:PORT (port 0 = any free one). `tls` None: plain text.

        Raises ConfigError naming --metrics-port if the port is taken.
        """
        sock = listen(host, port, option=OPTION)
        self._server = _Server(sock, self._app, tls)
        self._loop.add_reader(sock, self._server.handle_request)
        return f"{host}:{sock.getsockname()[1]}"

    def close(self) -> None:
        """Accept no new connections. Idempotent, also before `start`."""
        if self._server is not None:
            self._loop.remove_reader(self._server.socket)
            self._server.server_close()
            self._server = None


class _MetricsApp:
    """WSGI application: the library's, at one path."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._answer = make_wsgi_app(registry)

    def __call__(self, environ: Environ, start_response: StartResponse) -> Iterable[bytes]:
        """Answer a request: 404 for other paths, 503 while the event loop does not answer or the service is stopping."""

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
    """Handler of one connection; requests are logged at DEBUG only."""

    timeout = _CLIENT_TIMEOUT_S

    def log_message(self, format: str, *args: Any) -> None:
        """Log at DEBUG."""
        log.debug("metrics asked for: %s", args[1] if len(args) > 1 else "")


class _Server(ThreadingMixIn, WSGIServer):
    """WSGI server on a socket that is already listening; call `handle_request` whenever it is readable."""

    daemon_threads = True
    timeout = 0

    def __init__(self, sock: socket.socket, app: _MetricsApp, tls: ssl.SSLContext | None) -> None:
        super().__init__(sock.getsockname()[:2], _Handler, bind_and_activate=False)
        self.socket.close()
        self.socket = sock
        # A client that connects and disconnects at once must not block the loop.
        self.socket.setblocking(False)
        self._tls = tls
        # The library would look up its own host name here, which may take seconds.
        self.server_name, self.server_port = sock.getsockname()[:2]
        self.setup_environ()
        self.set_app(app)

    def get_request(self) -> tuple[socket.socket, Any]:
        """Accept the next connection; the TLS handshake follows on the connection's thread."""
        connection, address = self.socket.accept()
        connection.setblocking(True)
        if self._tls is None:
            return connection, address
        return self._tls.wrap_socket(connection, server_side=True, do_handshake_on_connect=False), address

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Log a client that disconnected or presented no certificate."""
        log.debug("a scrape ended early", exc_info=True)
