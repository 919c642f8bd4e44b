"""Guard of the HTTP API: every path needs a known caller, except for the few listed here. An ASGI application."""

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from gateway_svc.calls import Callers
from gateway_svc.http.dialect import dialect_of
from gateway_svc.http.io import Reply
from svc_common.errors import QuireError

OPEN_PATHS = frozenset({"/health", "/metrics", "/openapi.json", "/ping", "/version"})
OPEN_FOLDER = "/health/"


class HttpGuard:
    """Passes calls with a known key to `app`; answers others itself, before their body is read."""

    def __init__(self, app: ASGIApp, callers: Callers) -> None:
        self._app = app
        self._callers = callers

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Guard one request. Other protocols (web sockets) are refused, since no route supports them."""
        if scope["type"] != "http":
            await send({"type": f"{scope['type']}.close"})
            return
        if not is_open(scope["path"]):
            headers = Headers(scope=scope)
            try:
                self._callers.of(headers).terms.count_call()
            except QuireError as error:
                await Reply(send, dialect_of(scope["path"], headers)).error(error)
                return
        await self._app(scope, receive, send)


def is_open(path: str) -> bool:
    """True if the path needs no key."""
    return path in OPEN_PATHS or path.startswith(OPEN_FOLDER)
