"""HTTP input and output: bounded bodies, JSON, server-sent events (SSE)."""

import asyncio
import contextlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from starlette.types import Receive, Send

from gateway_svc.calls import ClientGone
from gateway_svc.http.dialect import OPENAI, Dialect
from gateway_svc.http.errors import BodyTooLarge, error_headers, http_status
from svc_common.clipping import clip
from svc_common.clock import monotonic_ns
from svc_common.errors import FieldViolation, InvalidArgument, QuireError
from svc_common.net.rpc import PUBLIC_MESSAGE_BYTES

MOST_READ_BYTES = 8 * PUBLIC_MESSAGE_BYTES
READ_AWAY_S = 1.0


def check_is_json(headers: Mapping[str, str]) -> None:
    """Raise InvalidArgument unless the content type is JSON.

    Browsers send other types, or none, cross-site without preflight.
    """
    media = headers.get("content-type", "").partition(";")[0].strip().lower()
    if media != "application/json" and not (media.startswith("application/") and media.endswith("+json")):
        given = f"is {clip(media, 100)!r}" if media else "is missing"
        raise InvalidArgument(
            f"content-type: {given}; send application/json",
            reason="UNSUPPORTED_MEDIA_TYPE",
            violations=[FieldViolation("content-type", f"{given}; send application/json")],
        )


async def read_body(receive: Receive) -> bytes:
    """Read the whole body. Raises BodyTooLarge beyond 4 MiB, and ClientGone on a disconnect."""
    parts: list[bytes] = []
    size = 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientGone
        part = message.get("body", b"")
        size += len(part)
        if size <= PUBLIC_MESSAGE_BYTES:
            parts.append(part)
        is_last = not message.get("more_body")
        # Read on for a while: a client that is still sending when the connection closes never sees the
        # response.
        if size > PUBLIC_MESSAGE_BYTES and (is_last or size > MOST_READ_BYTES):
            raise BodyTooLarge.field("body", f"is larger than {PUBLIC_MESSAGE_BYTES} bytes")
        if is_last:
            return b"".join(parts)


async def read_away(receive: Receive) -> None:
    """Read the rest of a refused request, bounded in time and size.

    A client that is still sending when the connection closes would never see the response.
    """
    size = 0
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(READ_AWAY_S):
            while size <= MOST_READ_BYTES:
                message = await receive()
                size += len(message.get("body", b""))
                if message["type"] == "http.disconnect" or not message.get("more_body"):
                    return


@dataclass(slots=True)
class Reply:
    """Response to one request in an API's dialect: JSON once, or server-sent events. `headers` are sent with its start."""

    _send: Send
    _dialect: Dialect = OPENAI
    headers: dict[str, str] = field(default_factory=dict)
    status: int = 0
    _begun_ns: int = field(default_factory=monotonic_ns)
    _started: bool = False
    _ended: bool = False

    async def json(self, value: Any, *, status: int = 200) -> None:
        """Send a complete JSON response."""
        body = _json(value)
        await self._start(status, {"content-type": "application/json", "content-length": str(len(body))})
        await self._send({"type": "http.response.body", "body": body})

    async def events(self, values: Iterable[Mapping[str, Any]]) -> None:
        """Send each value as one event.

        Returns when the connection has room again, so a slow reader slows only itself.
        """
        if not self._started:
            kind = "text/event-stream; charset=utf-8"
            await self._start(200, {"content-type": kind, "cache-control": "no-cache", "x-accel-buffering": "no"})
        parts: list[bytes] = []
        for value in values:
            if name := self._dialect.event_name(value):
                parts += (b"event: ", name.encode(), b"\n")
            parts += (b"data: ", _json(value), b"\n\n")
        await self._send({"type": "http.response.body", "body": b"".join(parts), "more_body": True})

    async def end_events(self) -> None:
        """Send the API's end mark and end the response."""
        if self._dialect.end_mark:
            await self._send({"type": "http.response.body", "body": self._dialect.end_mark, "more_body": True})
        await self._end()

    async def error(self, error: QuireError) -> None:
        """Send the error as the response or, in a stream that has begun, as its last event (without the end mark).

        No-op after `end_events`: an answer may tell of its failure by itself.
        """
        if self._ended:
            return
        request_id = self.headers.get("x-request-id", "")
        if self._started:
            await self.events([self._dialect.error_event(error, request_id)])
            await self._end()
        else:
            self.headers |= error_headers(error)
            await self.json(self._dialect.error_body(error, request_id), status=http_status(error))

    async def _start(self, status: int, headers: dict[str, str]) -> None:
        self._started, self.status = True, status
        own = {"openai-processing-ms": str((monotonic_ns() - self._begun_ns) // 1_000_000)}
        raw = [(name.encode(), value.encode("latin-1")) for name, value in (headers | own | self.headers).items()]
        await self._send({"type": "http.response.start", "status": status, "headers": raw})

    async def _end(self) -> None:
        self._ended = True
        await self._send({"type": "http.response.body", "body": b"", "more_body": False})


def _json(value: Any) -> bytes:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode()
