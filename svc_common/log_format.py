"""How services write their log: exceptions with their types and the lines that they went through, and without what they say.

An exception of a bug, or of a library, may quote what it was given: a prompt. Its type and its way through the code find the bug
all the same, and its id is what the client was told. Our own errors (QuireError) and those of the operating system quote no input:
they are written whole.
"""

import asyncio
import logging
import traceback
from collections.abc import Iterator
from types import TracebackType
from typing import Any

from svc_common.errors import QuireError

log = logging.getLogger(__name__)

_QUOTE_NOTHING = (QuireError, OSError)
_LEFT_OUT = "(what it says is left out: it may quote a prompt)"
_CAUSE = "\nThe above exception was the direct cause of the following exception:\n\n"
_CONTEXT = "\nDuring handling of the above exception, another exception occurred:\n\n"

ExceptionInfo = tuple[type[BaseException], BaseException, TracebackType | None] | tuple[None, None, None]


class DiscreetFormatter(logging.Formatter):
    """A Formatter whose tracebacks leave out what exceptions say."""

    def formatException(self, ei: ExceptionInfo) -> str:
        """See logging.Formatter."""
        return "" if ei[1] is None else "".join(_chain(ei[1], set())).rstrip("\n")


def _chain(error: BaseException, seen: set[int]) -> Iterator[str]:
    """The exception behind those that led to it, as Python writes them."""
    seen.add(id(error))
    earlier = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    if earlier is not None and id(earlier) not in seen:
        yield from _chain(earlier, seen)
        yield _CONTEXT if error.__cause__ is None else _CAUSE
    if error.__traceback__ is not None:
        yield "Traceback (most recent call last):\n"
        yield from traceback.format_tb(error.__traceback__)
    yield f"{_type_name(type(error))}: {error if isinstance(error, _QUOTE_NOTHING) else _LEFT_OUT}\n"
    if isinstance(error, BaseExceptionGroup):
        for one in error.exceptions:
            yield "\nOne of its exceptions:\n\n"
            yield from _chain(one, seen)


def _type_name(kind: type[BaseException]) -> str:
    return kind.__name__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"


def set_up(level: str) -> None:
    """The process' log goes to standard error, from `level` on, in this form."""
    handler = logging.StreamHandler()
    handler.setFormatter(DiscreetFormatter("%(levelname)s %(name)s: %(message)s"))
    logging.basicConfig(level=level, handlers=[handler])


def on_loop_error(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """For `loop.set_exception_handler`: asyncio's own words have the exception's in them."""
    log.error("asyncio: %s", context["message"], exc_info=context.get("exception"))
