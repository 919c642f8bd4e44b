"""Log formats of the services, text and JSON. Tracebacks have exception types and lines but no messages.

The message of a bug's or a library's exception may quote its input, such as a prompt. Type and traceback
suffice to find the bug, and the client was given its id. Errors of Quire (QuireError) and of the operating
system quote no input and are written in full.
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

import grpc.aio

from svc_common.errors import QuireError
from svc_common.observability import log_context
from svc_common.observability.log_context import LogContext

log = logging.getLogger(__name__)

_QUOTE_NOTHING = (QuireError, OSError)
_LEFT_OUT = "(what it says is left out: it may quote a prompt)"
_CAUSE = "\nThe above exception was the direct cause of the following exception:\n\n"
_CONTEXT = "\nDuring handling of the above exception, another exception occurred:\n\n"

STATS_LOGGER, MEMORY_LOGGER = "quire.stats", "quire.memory"
"""Loggers that operators see even at the default level, WARNING; an explicit level applies to these too."""
_DEFAULT_LEVEL = "WARNING"

ExceptionInfo = tuple[type[BaseException], BaseException, TracebackType | None] | tuple[None, None, None]


class LogFormat(enum.StrEnum):
    """Log line formats."""

    TEXT = "text"
    JSON = "json"


class DiscreetFormatter(logging.Formatter):
    """Formatter that omits exception messages from tracebacks."""

    def formatException(self, ei: ExceptionInfo) -> str:
        """Format a traceback without exception messages."""
        return "" if ei[1] is None else "".join(_chain(ei[1], set())).rstrip("\n")


class JsonFormatter(DiscreetFormatter):
    """Formatter of one JSON object per line, with the fields of docs/metrics.md; unknown fields are omitted."""

    def __init__(self, service: str) -> None:
        super().__init__()
        self._service = service

    def line(self, logger: str, message: str) -> str:
        """Format a message that no logger produced."""
        return self.format(logging.LogRecord(logger, logging.INFO, "", 0, "%s", (message,), None))

    def format(self, record: logging.LogRecord) -> str:
        """Format a record as one JSON object."""
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
    """Traceback lines of an exception after those of its causes, in Python's layout."""
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


def formatter(form: LogFormat, service: str = "") -> DiscreetFormatter:
    """The formatter of a process's log. `service`: its name in JSON."""
    return (
        JsonFormatter(service) if form is LogFormat.JSON else DiscreetFormatter("%(levelname)s %(name)s: %(message)s")
    )


def set_up(level: str | None, form: LogFormat = LogFormat.TEXT, service: str = "") -> None:
    """Configure the process's log on standard error.

    `level` None: WARNING, plus the loggers meant for operators. The JSON format also captures Python's
    warnings.
    """
    handler = logging.StreamHandler()
    handler.setFormatter(formatter(form, service))
    handler.addFilter(_is_no_departure)
    logging.basicConfig(level=level or _DEFAULT_LEVEL, handlers=[handler])
    logging.captureWarnings(form is LogFormat.JSON)
    for name in (STATS_LOGGER, MEMORY_LOGGER) if level is None else ():
        logging.getLogger(name).setLevel(logging.INFO)


def _is_no_departure(record: logging.LogRecord) -> bool:
    """False for what gRPC reports as an error if a client leaves just when a message to it is written."""
    error = record.exc_info[1] if record.exc_info else None
    return not (record.name.startswith("grpc.") and isinstance(error, grpc.aio.InternalError))


def on_loop_error(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """Handler for `loop.set_exception_handler`, since asyncio's own message includes that of the exception."""
    log.error("asyncio: %s", context["message"], exc_info=context.get("exception"))
