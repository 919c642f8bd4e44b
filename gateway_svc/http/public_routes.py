"""Routes that need no caller: health for load balancers, version, and errors for unknown paths."""

from collections.abc import Callable, Mapping, Sequence

from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from gateway_svc.http.dialect import dialect_of, speaks_anthropic
from gateway_svc.http.errors import error_headers, http_status
from gateway_svc.request_ids import accept_request_id, new_request_id
from svc_common.errors import InvalidArgument, NotFound, QuireError
from svc_common.version import VERSION

_INSTEAD = {"/tokenizer_info": "start the gateway with --enable-tokenizer-info-endpoint"}


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
    return _error_response(request, error, http_status(error), error_headers(error))


async def http_error(request: Request, error: Exception) -> Response:
    """Answer with Starlette's own errors: unknown paths and methods."""
    assert isinstance(error, HTTPException)
    known = _known(f"{request.method} {request.url.path[:256]}: {error.detail}", request.url.path, error.status_code)
    return _error_response(request, known, error.status_code, error.headers)


def _error_response(request: Request, error: QuireError, status: int, headers: Mapping[str, str] | None) -> Response:
    request_id = _id_of(request.headers)
    body = dialect_of(request.url.path, request.headers).error_body(error, request_id)
    return JSONResponse(body, status_code=status, headers={"x-request-id": request_id, **(headers or {})})


def _known(message: str, path: str, status: int) -> QuireError:
    if instead := _INSTEAD.get(path):
        return NotFound(f"{message}; {instead}", reason="UNKNOWN_PATH")
    if status == 405:
        return InvalidArgument(message, reason="METHOD_NOT_ALLOWED")
    return NotFound(message, reason="UNKNOWN_PATH")


class RequestIds:
    """Middleware that gives every response an x-request-id, and a request-id in Anthropic's API.

    It is the call's id, else the client's own if well formed, else a new one.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass everything on, and add the headers that are missing."""

        async def with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = list(message.get("headers", ()))
                given = next((value for name, value in headers if name == b"x-request-id"), b"")
                request_id = given or _id_of(asked).encode()
                if not given:
                    headers.append((b"x-request-id", request_id))
                if speaks_anthropic(scope["path"], asked):
                    headers.append((b"request-id", request_id))
                message = {**message, "headers": headers}
            await send(message)

        asked = Headers(scope=scope)
        await self._app(scope, receive, with_id if scope["type"] == "http" else send)


def _id_of(headers: Mapping[str, str]) -> str:
    try:
        return accept_request_id(headers.get("x-request-id"))
    except InvalidArgument:
        return new_request_id()
