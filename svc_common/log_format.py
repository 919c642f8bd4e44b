"""How services write their log, as text or as JSON: exceptions with their types and the lines that they went through, and without
what they say.

An exception of a bug, or of a library, may quote what it was given: a prompt. Its type and its way through the code find the bug
all the same, and its id is what the client was told. Our own errors (QuireError) and those of the operating system quote no input:
they are written whole.
"""

import asyncio
import enum
import json
import logging
import traceback
from collections.abc import Iterator
from datetime import UTC, datetime
from types import TracebackType
from typing import Any

from svc_common import log_context
from svc_common.errors import QuireError
from svc_common.log_context import LogContext

log = logging.getLogger(__name__)

_QUOTE_NOTHING = (QuireError, OSError)
_LEFT_OUT = "(what it says is left out: it may quote a prompt)"
_CAUSE = "\nThe above exception was the direct cause of the following exception:\n\n"
_CONTEXT = "\nDuring handling of the above exception, another exception occurred:\n\n"

STATS_LOGGER, MEMORY_LOGGER = "quire.stats", "quire.operators.memory"
"""What operators are told also at the default level, WARNING; a level that is given holds for these too."""
_DEFAULT_LEVEL = "WARNING"

ExceptionInfo = tuple[type[BaseException], BaseException, TracebackType | None] | tuple[None, None, None]


class LogFormat(enum.StrEnum):
    """Forms of a line."""

    TEXT = "text"
    JSON = "json"


class DiscreetFormatter(logging.Formatter):
    """A Formatter whose tracebacks leave out what exceptions say."""

    def formatException(self, ei: ExceptionInfo) -> str:
        """See logging.Formatter."""
        return "" if ei[1] is None else "".join(_chain(ei[1], set())).rstrip("\n")


class JsonFormatter(DiscreetFormatter):
    """The same as one JSON object per line, fields as in docs/metrics.md; what is not known is left out."""

    def __init__(self, service: str) -> None:
        super().__init__()
        self._service = service

    def line(self, logger: str, message: str) -> str:
        """Words that came without a logger."""
        return self.format(logging.LogRecord(logger, logging.INFO, "", 0, "%s", (message,), None))

    def format(self, record: logging.LogRecord) -> str:
        """See logging.Formatter."""
        about: LogContext = getattr(record, "about", None) or log_context.current()
        line = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="microseconds"),
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
            "service": self._service,
            "trace_id": about.trace_id,
            "span_id": about.span_id,
            "request_id": about.request_id,
            "tenant": about.tenant,
            "exception": self.formatException(record.exc_info) if record.exc_info else "",
        }
        return json.dumps({name: value for name, value in line.items() if value})


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


def set_up(level: str | None, form: LogFormat = LogFormat.TEXT, service: str = "") -> None:
    """The process' log goes to standard error, from `level` on (None: WARNING, and what operators are told), in this form.

    JSON has Python's warnings too.
    """
    handler = logging.StreamHandler()
    handler.setFormatter(
        JsonFormatter(service) if form is LogFormat.JSON else DiscreetFormatter("%(levelname)s %(name)s: %(message)s")
    )
    logging.basicConfig(level=level or _DEFAULT_LEVEL, handlers=[handler])
    logging.captureWarnings(form is LogFormat.JSON)
    for name in (STATS_LOGGER, MEMORY_LOGGER) if level is None else ():
        logging.getLogger(name).setLevel(logging.INFO)


def on_loop_error(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """For `loop.set_exception_handler`: asyncio's own words have the exception's in them."""
    log.error("asyncio: %s", context["message"], exc_info=context.get("exception"))
