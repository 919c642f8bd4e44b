"""What a route is asked for, read from the address. InvalidArgument for what is none."""

from starlette.requests import Request

from svc_common.errors import InvalidArgument

_MAX_DIGITS = 15
_MAX_WORD = 256


def whole_number(request: Request, name: str, default: int) -> int:
    """A number from 0 on."""
    given = request.query_params.get(name)
    if given is None:
        return default
    if not (given.isascii() and given.isdigit() and len(given) <= _MAX_DIGITS):
        raise InvalidArgument.field(name, "must be a whole number from 0 on")
    return int(given)


def word(request: Request, name: str) -> str:
    """A word; empty where it is not given."""
    given = request.query_params.get(name, "")
    if len(given) > _MAX_WORD:
        raise InvalidArgument.field(name, f"is longer than {_MAX_WORD} characters")
    return given
