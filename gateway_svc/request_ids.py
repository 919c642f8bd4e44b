"""Request ids: new UUIDv7 ids (sortable by time), or the caller's own after a check."""

import re
import secrets
import uuid

from svc_common.clock import wall_ns
from svc_common.errors import InvalidArgument

_ALLOWED = re.compile(r"[A-Za-z0-9._:@=+-]{1,128}")


def new_request_id() -> str:
    """Make a UUIDv7 (RFC 9562): 48 bits of Unix milliseconds, then random bits."""
    millis = wall_ns() // 1_000_000
    value = (millis & (2**48 - 1)) << 80 | 0x7 << 76 | secrets.randbits(12) << 64 | 0b10 << 62 | secrets.randbits(62)
    return str(uuid.UUID(int=value))


def accept_request_id(given: str | None, name: str = "x-request-id") -> str:
    """Return `given` if it is well formed, or a new id if it is absent.

    Otherwise raises InvalidArgument naming the header `name`.
    """
    if not given:
        return new_request_id()
    if not _ALLOWED.fullmatch(given):
        raise InvalidArgument.field(name, "must be 1 to 128 of the characters A-Z a-z 0-9 . _ : @ = + -")
    return given
