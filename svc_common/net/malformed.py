"""Refuse malformed protobuf with a typed error: an interceptor for generated handlers, `parse` for handlers that take raw bytes.

grpc would end such a call as INTERNAL or UNKNOWN with a traceback in the log.
"""

from collections.abc import AsyncIterator, Callable
from typing import Any, TypeVar

import grpc.aio
from google.protobuf.message import DecodeError, Message

from svc_common.errors import FieldViolation, InvalidArgument
from svc_common.net.handlers import Handler, behind

_Deserialize = Callable[[bytes], Any]
M = TypeVar("M", bound=Message)


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


def parse(cls: type[M], raw: bytes) -> M:
    """Parse `raw`. Raises InvalidArgument MALFORMED_MESSAGE for malformed protobuf and for text that is not UTF-8."""
    try:
        return cls.FromString(raw)
    except DecodeError:
        raise malformed(f"a {cls.DESCRIPTOR.full_name}") from None


def malformed(what: str) -> InvalidArgument:
    """Error for bytes that are no valid `what`."""
    problem = f"is not {what}: malformed protobuf, or a text field that is not UTF-8"
    return InvalidArgument(
        f"the message {problem}", reason="MALFORMED_MESSAGE", violations=[FieldViolation("request", problem)]
    )
