"""Which request a line of the log is about: kept for the task that serves it, or said with the line itself."""

import hashlib
from contextvars import ContextVar
from dataclasses import dataclass

from opentelemetry.trace import Span, format_span_id, format_trace_id

_TENANT_HASH_BYTES = 6


@dataclass(frozen=True, slots=True)
class LogContext:
    """Ids of what is served. `tenant`: of whom, as its hash; empty fields = not known, or none."""

    request_id: str = ""
    tenant: str = ""
    trace_id: str = ""
    span_id: str = ""

    @classmethod
    def of(cls, *, request_id: str, tenant: str, span: Span) -> "LogContext":
        """From a tenant's name and a span, which may be of no trace."""
        context = span.get_span_context()
        ids = (format_trace_id(context.trace_id), format_span_id(context.span_id)) if context.is_valid else ()
        return cls(request_id, tenant_hash(tenant), *ids)

    @classmethod
    def of_message(cls, *, request_id: str, tenant: str, traceparent: str) -> "LogContext":
        """The same from what a message says of its trace, in W3C's form; empty = nothing."""
        return cls(request_id, tenant_hash(tenant), *traceparent.split("-")[1:3])


_NOTHING = LogContext()
_CURRENT: ContextVar[LogContext] = ContextVar("log_context", default=_NOTHING)


def enter(context: LogContext) -> None:
    """What this task writes from here on is about that; tasks that it starts inherit it, others do not see it."""
    _CURRENT.set(context)


def current() -> LogContext:
    """What the running task serves."""
    return _CURRENT.get()


def about(context: LogContext) -> dict[str, LogContext]:
    """`extra` of one line in the log of somebody who serves many: log.warning("...", extra=about(...))."""
    return {"about": context}


def tenant_hash(tenant: str) -> str:
    """12 hex digits that stand for a tenant's name in logs, the same in all services; of the default tenant none."""
    return hashlib.blake2b(tenant.encode(), digest_size=_TENANT_HASH_BYTES).hexdigest() if tenant else ""
