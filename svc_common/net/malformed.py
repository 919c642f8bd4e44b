"""Refuse malformed protobuf with a typed error, for handlers of generated code. An interceptor.

grpc would end such a call as INTERNAL or UNKNOWN with a traceback in the log. Handlers that take raw bytes
use `parsing`.
"""

from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc.aio
from google.protobuf.message import DecodeError

from svc_common.errors import FieldViolation, InvalidArgument
from svc_common.net.handlers import Handler, behind

_Deserialize = Callable[[bytes], Any]


class MalformedRefused(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]
    """Interceptor that parses messages inside the call: InvalidArgument MALFORMED_MESSAGE if that fails.

    Must be the last one.
    """

    async def intercept_service(self, continuation: Callable[..., Any], details: Any) -> Handler:
        """Return the handler, changed to take raw bytes."""
        handler = await continuation(details)
        if handler is None or handler.request_deserializer is None:
            return handler
        method, deserialize = details.method.rpartition("/")[2], handler.request_deserializer
        if handler.request_streaming:
            return behind(handler, lambda raw, context: _parse_each(raw, deserialize, method), deserializer=None)
        return behind(handler, lambda raw, context: _parse(raw, deserialize, method), deserializer=None)


def _parse(raw: bytes, deserialize: _Deserialize, method: str) -> Any:
    try:
        return deserialize(raw)
    except DecodeError:
        raise malformed(f"a request of {method}") from None


async def _parse_each(messages: AsyncIterator[bytes], deserialize: _Deserialize, method: str) -> AsyncIterator[Any]:
    try:
        async for raw in messages:
            yield deserialize(raw)
    except DecodeError:
        raise malformed(f"a request of {method}") from None


def malformed(what: str) -> InvalidArgument:
    """Error for bytes that are no valid `what`."""
    problem = f"is not {what}: malformed protobuf, or a text field that is not UTF-8"
    return InvalidArgument(
        f"the message {problem}", reason="MALFORMED_MESSAGE", violations=[FieldViolation("request", problem)]
    )
