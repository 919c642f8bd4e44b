"""Routes that need no caller: health for load balancers, version, and errors for unknown paths."""

from collections.abc import Callable, Sequence

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from gateway_svc.http.errors import error_body, error_headers, http_status
from gateway_svc.request_ids import accept_request_id, new_request_id
from svc_common.errors import InvalidArgument, NotFound, QuireError
from svc_common.version import VERSION

_INSTEAD = {
    "/v1/responses": "POST /v1/chat/completions answers conversations, tools and schemas included",
    "/v1/messages": "POST /v1/chat/completions answers conversations",
    "/tokenizer_info": "start the gateway with --enable-tokenizer-info-endpoint",
}


def public_routes(not_ready_because: Callable[[], str]) -> Sequence[Route]:
    """Make the routes. `not_ready_because()`: empty if requests can be served, else the reason for people."""
    ready = _ready(not_ready_because)
    return [
        Route("/health/live", _live, methods=["GET"]),
        *(Route(path, ready, methods=["GET"]) for path in ("/health/ready", "/health")),
        Route("/ping", ready, methods=["GET", "POST"]),
        Route("/version", _version, methods=["GET"]),
    ]


async def _live(request: Request) -> Response:
    """Answer that the process is live."""
    return JSONResponse({"status": "live"})


async def _version(request: Request) -> Response:
    """Answer with the release, under vLLM's path."""
    return JSONResponse({"version": VERSION})


def _ready(not_ready_because: Callable[[], str]) -> Callable[[Request], object]:
    async def ready(request: Request) -> Response:
        """Answer whether requests can be served."""
        reason = not_ready_because()
        if reason:
            return JSONResponse({"status": "not ready", "reason": reason}, status_code=503)
        return JSONResponse({"status": "ready"})

    return ready


# --- routing errors --------------------------------------------------------------------------------------------------


async def known_error(request: Request, error: Exception) -> Response:
    """Answer with the QuireError of a plain route."""
    assert isinstance(error, QuireError)
    return JSONResponse(error_body(error), status_code=http_status(error), headers=error_headers(error))


async def http_error(request: Request, error: Exception) -> Response:
    """Answer with Starlette's own errors: unknown paths and methods."""
    assert isinstance(error, HTTPException)
    known = _known(f"{request.method} {request.url.path[:256]}: {error.detail}", request.url.path, error.status_code)
    return JSONResponse(error_body(known), status_code=error.status_code, headers=error.headers)


def _known(message: str, path: str, status: int) -> QuireError:
    for start, instead in _INSTEAD.items():
        if path.startswith(start):
            return NotFound(f"{message}; {instead}", reason="UNKNOWN_PATH")
    if status == 405:
        return InvalidArgument(message, reason="METHOD_NOT_ALLOWED")
    return NotFound(message, reason="UNKNOWN_PATH")


class RequestIds:
    """Middleware that gives every response an x-request-id.

    It is the call's id, else the client's own if well formed, else a new one.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass everything on, and add the header if missing."""

        async def with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = list(message.get("headers", ()))
                if not any(name == b"x-request-id" for name, _ in headers):
                    headers.append((b"x-request-id", _id_of(scope).encode()))
                message = {**message, "headers": headers}
            await send(message)

        await self._app(scope, receive, with_id if scope["type"] == "http" else send)


def _id_of(scope: Scope) -> str:
    given = next((value.decode("latin-1") for name, value in scope["headers"] if name == b"x-request-id"), None)
    try:
        return accept_request_id(given)
    except InvalidArgument:
        return new_request_id()
