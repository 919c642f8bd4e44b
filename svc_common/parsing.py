"""Bytes of a caller to a message. Handlers that take raw bytes and parse them here refuse bad ones typed; the transport's own
parsing would end the call as its INTERNAL or UNKNOWN (operations.md 1.2)."""

from typing import TypeVar

from google.protobuf.message import DecodeError, Message

from svc_common.errors import InvalidArgument

M = TypeVar("M", bound=Message)


def parse(cls: type[M], raw: bytes) -> M:
    """`raw` as a message. InvalidArgument for malformed protobuf and for text that is not UTF-8."""
    try:
        return cls.FromString(raw)
    except DecodeError as error:
        raise InvalidArgument.field(
            "request",
            f"is no valid {cls.DESCRIPTOR.full_name}: malformed protobuf, or a text field that is not UTF-8",
        ) from error
