"""HTTP as the OpenAI door needs it: bounded bodies, JSON, server-sent events, errors in OpenAI's shape, disconnects."""

import asyncio
import json
import math
import re
from collections.abc import Coroutine, Iterable
from typing import Any, TypeVar

from starlette.types import Message, Receive, Send

from svc_common.errors import InvalidArgument, QuireError
from svc_common.rpc import PUBLIC_MESSAGE_BYTES

T = TypeVar("T")

_CODES = {"PROMPT_TOO_LONG": "context_length_exceeded", "MODEL_NOT_FOUND": "model_not_found"}
_TYPES = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 429: "rate_limit_error"}
_PARAMS = {
    "stop_strings": "stop",
    "text": "prompt",
    "token_ids.ids": "prompt",
    "prompt": "prompt",
    "logit_bias": "logit_bias",
    "allowed_token_ids": "allowed_token_ids",
    "bad_words": "bad_words",
    "inputs": "input",
    "json_schema": "response_format",
    "regex": "guided_regex",
    "choice": "guided_choice",
    "lark": "guided_grammar",
}
_GROUPS = re.compile(r"^(sampling\.beam|sampling|stop|response|scheduling|cache|structured_output)\.")


class ClientGone(Exception):
    """The client closed the connection; nobody is left to answer."""


class BodyTooLarge(InvalidArgument):
    """More than the door takes."""

    http_status = 413


async def read_body(receive: Receive) -> bytes:
    """The whole body. BodyTooLarge beyond 4 MiB, ClientGone when the client left."""
    parts: list[bytes] = []
    size = 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientGone
        parts.append(message.get("body", b""))
        size += len(parts[-1])
        if size > PUBLIC_MESSAGE_BYTES:
            raise BodyTooLarge.field("body", f"is larger than {PUBLIC_MESSAGE_BYTES} bytes")
        if not message.get("more_body"):
            return b"".join(parts)


async def until_disconnect(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """Result of `work`; when the client goes first, `work` is cancelled and ClientGone raised."""
    worker = asyncio.ensure_future(work)
    watcher = asyncio.ensure_future(_disconnected(receive))
    try:
        await asyncio.wait((worker, watcher), return_when=asyncio.FIRST_COMPLETED)
        if not worker.done():
            raise ClientGone
        return worker.result()
    finally:
        for task in (worker, watcher):
            task.cancel()
        await asyncio.gather(worker, watcher, return_exceptions=True)


async def _disconnected(receive: Receive) -> None:
    message: Message = {"type": "http.request"}
    while message["type"] != "http.disconnect":
        message = await receive()


# --- answers ---------------------------------------------------------------------------------------------------------


class Reply:
    """The answer to one request: JSON once, or server-sent events. `headers` go out with its start."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self._started = False
        self.headers: dict[str, str] = {}
        self.status = 0

    async def json(self, value: Any, *, status: int = 200) -> None:
        """A complete JSON answer."""
        body = _json(value)
        await self._start(status, {"content-type": "application/json", "content-length": str(len(body))})
        await self._send({"type": "http.response.body", "body": body})

    async def events(self, values: Iterable[Any]) -> None:
        """Each value as one event; returns when the connection has room again, so a slow reader slows only itself."""
        if not self._started:
            kind = "text/event-stream; charset=utf-8"
            await self._start(200, {"content-type": kind, "cache-control": "no-cache", "x-accel-buffering": "no"})
        await self._part(b"".join(b"data: " + _json(value) + b"\n\n" for value in values))

    async def end_events(self) -> None:
        """OpenAI's end mark, and the end."""
        await self._part(b"data: [DONE]\n\n")
        await self._part(b"", last=True)

    async def error(self, error: QuireError) -> None:
        """The error as the answer; in a stream that has begun, as its last event (without the end mark)."""
        if self._started:
            await self.events([error_body(error)])
            await self._part(b"", last=True)
        else:
            self.headers |= retry_header(error)
            await self.json(error_body(error), status=error.http_status)

    async def _start(self, status: int, headers: dict[str, str]) -> None:
        self._started, self.status = True, status
        raw = [(name.encode(), value.encode("latin-1")) for name, value in (headers | self.headers).items()]
        await self._send({"type": "http.response.start", "status": status, "headers": raw})

    async def _part(self, data: bytes, *, last: bool = False) -> None:
        await self._send({"type": "http.response.body", "body": data, "more_body": not last})


def _json(value: Any) -> bytes:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode()


# --- errors ----------------------------------------------------------------------------------------------------------


def error_body(error: QuireError) -> dict[str, Any]:
    """OpenAI's error object."""
    default = "server_error" if error.http_status >= 500 else "invalid_request_error"
    return {
        "error": {
            "message": error.message,
            "type": _TYPES.get(error.http_status, default),
            "param": _param(error.violations[0].field) if error.violations else None,
            "code": _CODES.get(error.reason, error.reason.lower()),
        }
    }


def retry_header(error: QuireError) -> dict[str, str]:
    """Retry-After, in whole seconds, where the error says when to try again."""
    return {} if error.retry_after_s is None else {"retry-after": str(max(1, math.ceil(error.retry_after_s)))}


def _param(field: str) -> str:
    """Our field path as OpenAI's name of the parameter."""
    field = _GROUPS.sub("", field)
    base = re.sub(r"\[\d+\].*$", "", field)
    return _PARAMS.get(base, field)
