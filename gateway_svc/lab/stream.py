"""Stream steps and snapshots to pages as server-sent events, over a bounded number of connections."""

from contextlib import suppress
from typing import Any

from starlette.requests import Request
from starlette.types import Receive, Scope, Send

from gateway_svc.calls import ClientGone
from gateway_svc.http.disconnects import until_disconnect
from gateway_svc.http.errors import error_body
from gateway_svc.lab import values
from gateway_svc.lab.query import whole_number
from gateway_svc.lab.source import LabSnapshot, LabSource, Step
from svc_common.errors import QuireError, ResourceExhausted

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
    return b"event: " + kind.encode() + b"\ndata: " + values.encode(value) + b"\n\n"


def _part(data: bytes, *, more: bool = True) -> dict[str, Any]:
    return {"type": "http.response.body", "body": data, "more_body": more}
