"""ASGI application of the lab: the page, its JSON, its stream of steps, and additions by a gateway. Access: `guard`."""

import json
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import fields
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import FileResponse, Response
from starlette.routing import BaseRoute, Mount, Route
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp, Receive, Scope, Send

from gateway_svc.calls import ClientGone
from gateway_svc.http.disconnects import until_disconnect
from gateway_svc.http.errors import error_body
from gateway_svc.http.public_routes import http_error, known_error
from gateway_svc.lab.source import LabSnapshot, LabSource, Step
from svc_common.errors import InvalidArgument, QuireError, ResourceExhausted

_MAX_DIGITS = 15
_MAX_WORD = 256
MAX_PAGES = 8
"""Limit on open pages, since the scheduler builds every step's tables for each of them."""

_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-store"),
    (b"x-accel-buffering", b"no"),
]


class LabStepStream:
    """Route GET /lab/stream?since=STEP. An ASGI application; counts the open pages."""

    def __init__(self, source: LabSource) -> None:
        self._source = source
        self._num_pages = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Stream until the page disconnects or the source fails (sent as the last event).

        Raises ResourceExhausted for too many pages.
        """
        since = whole_number(Request(scope), "since", 0)
        if self._num_pages >= MAX_PAGES:
            raise ResourceExhausted(
                f"{MAX_PAGES} pages look at this lab already; close one", reason="TOO_MANY_PAGES", retry_after_s=5.0
            )
        self._num_pages += 1
        try:
            await send({"type": "http.response.start", "status": 200, "headers": _HEADERS})
            await send(_part(b": here\n\n"))
            with suppress(ClientGone):
                await until_disconnect(receive, self._follow(since, send))
        finally:
            self._num_pages -= 1

    async def _follow(self, since: int, send: Send) -> None:
        async def tell(told: Step | LabSnapshot) -> None:
            await send(_part(_event("step" if isinstance(told, Step) else "snapshot", told)))

        last = b""
        try:
            await self._source.follow(since, tell)
        except QuireError as error:
            last = _event("error", error_body(error)["error"])
        await send(_part(last, more=False))


def _event(kind: str, value: Any) -> bytes:
    return b"event: " + kind.encode() + b"\ndata: " + encode(value) + b"\n\n"


def _part(data: bytes, *, more: bool = True) -> dict[str, Any]:
    return {"type": "http.response.body", "body": data, "more_body": more}


PAGE = Path(__file__).parent / "page"
MOST_STEPS = 200

Measured = Callable[[str], Awaitable[tuple[bytes, str]]]
"""Takes an Accept header; returns metrics in Prometheus' text format and their content type."""


def lab_app(source: LabSource, *, play: ASGIApp | None = None, measured: Measured | None = None) -> Starlette:
    """Build the application.

    `play`: the OpenAI API, for the playground; `measured`: the answer of GET /metrics to an Accept header.
    """
    routes = _Routes(source)
    others: Sequence[BaseRoute] = [
        *([] if play is None else [Mount("/lab/api", play)]),
        *([] if measured is None else [Route("/metrics", _metrics(measured), methods=["GET"])]),
    ]
    return Starlette(
        routes=[
            Route("/", _index, methods=["GET"]),
            Mount("/page", StaticFiles(directory=PAGE)),
            Route("/lab/about", routes.about, methods=["GET"]),
            Route("/lab/steps", routes.steps, methods=["GET"]),
            Route("/lab/why", routes.why, methods=["GET"]),
            Route("/lab/stream", LabStepStream(source), methods=["GET"]),
            *others,
        ],
        exception_handlers={QuireError: known_error, HTTPException: http_error},
    )


async def _index(request: Request) -> Response:
    """Answer with the page."""
    return FileResponse(PAGE / "index.html")


def _metrics(measured: Measured) -> Callable[[Request], object]:
    async def answer(request: Request) -> Response:
        """Answer with the metrics in the requested format."""
        text, kind = await measured(request.headers.get("accept", ""))
        return Response(text, headers={"content-type": kind})

    return answer


class _Routes:
    """Routes that answer the page's queries from the source."""

    def __init__(self, source: LabSource) -> None:
        self._source = source

    async def about(self, request: Request) -> Response:
        """GET /lab/about."""
        return answer(await self._source.about())

    async def steps(self, request: Request) -> Response:
        """GET /lab/steps?since=STEP&limit=NUMBER."""
        limit = min(whole_number(request, "limit", MOST_STEPS), MOST_STEPS)
        return answer(await self._source.steps(whole_number(request, "since", 0), limit))

    async def why(self, request: Request) -> Response:
        """GET /lab/why?id=ID&tenant=NAME&needs=1."""
        request_id = word(request, "id")
        if not request_id:
            raise InvalidArgument.field("id", "is empty: which request is to be explained?")
        needs = whole_number(request, "needs", 0) > 0
        return answer(await self._source.why(request_id, word(request, "tenant"), needs=needs))


def whole_number(request: Request, name: str, default: int) -> int:
    """Parse a whole number, at least 0."""
    given = request.query_params.get(name)
    if given is None:
        return default
    if not (given.isascii() and given.isdigit() and len(given) <= _MAX_DIGITS):
        raise InvalidArgument.field(name, "must be a whole number from 0 on")
    return int(given)


def word(request: Request, name: str) -> str:
    """Return a short text; empty if not given."""
    given = request.query_params.get(name, "")
    if len(given) > _MAX_WORD:
        raise InvalidArgument.field(name, f"is longer than {_MAX_WORD} characters")
    return given


def encode(value: Any) -> bytes:
    """Encode `value` as JSON."""
    return json.dumps(value, default=_fields_of, ensure_ascii=False, separators=(",", ":")).encode()


def answer(value: Any) -> Response:
    """Make a route's response from `value`."""
    return Response(encode(value), media_type="application/json")


def _fields_of(value: Any) -> dict[str, Any]:
    return {field.name: getattr(value, field.name) for field in fields(value)}
