"""Bytes of a caller to a message. Handlers that take raw bytes and parse them here refuse bad ones typed; the transport's own
parsing would end the call as its INTERNAL or UNKNOWN (operations.md 1.2)."""

from typing import TypeVar

from google.protobuf.message import DecodeError, Message

from svc_common.malformed import malformed

M = TypeVar("M", bound=Message)


def parse(cls: type[M], raw: bytes) -> M:
    """`raw` as a message. InvalidArgument MALFORMED_MESSAGE for malformed protobuf and for text that is not UTF-8."""
    try:
        return cls.FromString(raw)
    except DecodeError:
        raise malformed(f"a {cls.DESCRIPTOR.full_name}") from None
