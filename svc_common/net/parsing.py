"""Parse a client's bytes into a message, with typed errors. For handlers that take raw bytes.

The transport's own parsing would end the call as its INTERNAL or UNKNOWN.
"""

from typing import TypeVar

from google.protobuf.message import DecodeError, Message

from svc_common.net.malformed import malformed

M = TypeVar("M", bound=Message)


def parse(cls: type[M], raw: bytes) -> M:
    """Parse `raw`. Raises InvalidArgument MALFORMED_MESSAGE for malformed protobuf and for text that is not UTF-8."""
    try:
        return cls.FromString(raw)
    except DecodeError:
        raise malformed(f"a {cls.DESCRIPTOR.full_name}") from None
