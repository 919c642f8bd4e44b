"""Checks of argument values, numpy's types included, and the texts of their errors. Pure."""

from collections.abc import Callable, Collection, Mapping, Sequence
from numbers import Integral, Real
from typing import Any

from svc_common.errors import InvalidArgument

_UINT32_MAX = 2**32 - 1


def is_number(value: Any) -> bool:
    """True for a number; False for booleans."""
    return isinstance(value, Real) and not isinstance(value, bool)


def is_whole(value: Any) -> bool:
    """True for a whole number, numpy's included; False for booleans."""
    return isinstance(value, Integral) and not isinstance(value, bool)


def is_listing(value: Any) -> bool:
    """True for a collection of values (list, tuple, array); False for text, bytes and mappings."""
    return isinstance(value, Collection) and not isinstance(value, str | bytes | bytearray | Mapping)


def wrong(value: Any, kind: Callable[[Any], bool], allowed: Callable[[Any], bool], text: str) -> str:
    """Text of what is wrong with `value`, empty if valid; None is always valid."""
    return "" if value is None or (kind(value) and allowed(value)) else f"is {value!r}; {text}"


def wrong_number(value: Any, least: float, most: float) -> str:
    """`wrong` for a number in [least, most]."""
    return wrong(value, is_number, lambda x: least <= x <= most, f"must be in {least:g}..{most:g}")


def wrong_ids(value: Any) -> str:
    """`wrong` for a list of token ids."""
    if value is None:
        return ""
    if not is_listing(value):
        return f"is {value!r}; must be a list of token ids"
    bad = [i for i in value if not is_whole(i) or i < 0]
    return f"has {bad[0]!r}, which is no token id" if bad else ""


def wrong_texts(value: Any, most: int, *, alone: bool) -> str:
    """`wrong` for up to `most` non-empty texts; `alone`: one text is accepted in place of a list."""
    if value is None or (alone and isinstance(value, str) and value):
        return ""
    if alone and isinstance(value, str):
        return "has an empty string"
    if not is_listing(value):
        return (
            f"is {value!r}; must be a list of texts"
            if not alone
            else f"is {value!r}; must be a text or a list of texts"
        )
    if not all(isinstance(text, str) for text in value):
        return "must have texts only"
    if len(value) > most:
        return f"has {len(value)} strings; at most {most}"
    return "" if all(value) else "has an empty string"


# --- or an error -------------------------------------------------------------------------------------------------------


def valid_request_id(request_id: str) -> str:
    """Return `request_id`, possibly empty; InvalidArgument if it cannot be sent as metadata."""
    if not isinstance(request_id, str) or not request_id.isascii() or (request_id and not request_id.isprintable()):
        raise InvalidArgument.field("request_id", f"is {request_id!r}; must be a text of printable ASCII characters")
    return request_id


def valid_text(name: str, text: object) -> str:
    """Return `text`; InvalidArgument if it is not a str or has a lone surrogate (which cannot be encoded)."""
    if not isinstance(text, str):
        raise InvalidArgument.field(name, f"must be a text, not {type(text).__name__}")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InvalidArgument.field(name, f"is no valid Unicode text ({error.reason} at {error.start})") from None
    return text


def valid_ids(name: str, ids: Sequence[int]) -> list[int]:
    """Return `ids` as plain ints; InvalidArgument if they are not a list of whole numbers that fit a uint32."""
    if not is_listing(ids):
        raise InvalidArgument.field(name, f"must be a list of token ids, not {type(ids).__name__}")
    bad = [i for i in ids if not is_whole(i) or not 0 <= i <= _UINT32_MAX]
    if bad:
        raise InvalidArgument.field(name, f"has {bad[0]!r}, which is no token id")
    return [int(i) for i in ids]
