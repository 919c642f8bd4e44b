"""Read query parameters of the lab's routes. Raises InvalidArgument for malformed ones."""

from starlette.requests import Request

from svc_common.errors import InvalidArgument

_MAX_DIGITS = 15
_MAX_WORD = 256


def whole_number(request: Request, name: str, default: int) -> int:
    """Parse a whole number, at least 0."""
    given = request.query_params.get(name)
    if given is None:
        return default
    if not (given.isascii() and given.isdigit() and len(given) <= _MAX_DIGITS):
        raise InvalidArgument.field(name, "must be a whole number from 0 on")
    return int(given)


def word(request: Request, name: str) -> str:
    """Return a short text; empty if not given."""
    given = request.query_params.get(name, "")
    if len(given) > _MAX_WORD:
        raise InvalidArgument.field(name, f"is longer than {_MAX_WORD} characters")
    return given
