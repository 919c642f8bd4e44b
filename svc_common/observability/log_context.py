"""Request context of log lines: set for the task that serves the request, or passed with a single line."""

import hashlib
from contextvars import ContextVar
from dataclasses import dataclass

from opentelemetry.trace import Span, format_span_id, format_trace_id

_TENANT_HASH_BYTES = 6


@dataclass(frozen=True, slots=True)
class LogContext:
    """Ids of the request being served. `tenant`: hash of the tenant's name; empty fields = unknown or none."""

    request_id: str = ""
    tenant: str = ""
    trace_id: str = ""
    span_id: str = ""

    @classmethod
    def of(cls, *, request_id: str, tenant: str, span: Span) -> "LogContext":
        """Make the context from a tenant's name and a span, which may have no trace."""
        context = span.get_span_context()
        ids = (format_trace_id(context.trace_id), format_span_id(context.span_id)) if context.is_valid else ()
        return cls(request_id, tenant_hash(tenant) if tenant else "", *ids)

    @classmethod
    def of_message(cls, *, request_id: str, tenant: str, traceparent: str) -> "LogContext":
        """Make the context from a message's trace context in W3C form; empty = none."""
        return cls(request_id, tenant_hash(tenant), *traceparent.split("-")[1:3])


_NOTHING = LogContext()
_CURRENT: ContextVar[LogContext] = ContextVar("log_context", default=_NOTHING)


def enter(context: LogContext) -> None:
    """Set the context of the running task's log lines; tasks that it starts inherit it, others are not affected."""
    _CURRENT.set(context)


def current() -> LogContext:
    """Return the running task's context."""
    return _CURRENT.get()


def about(context: LogContext) -> dict[str, LogContext]:
    """`extra` for one log line of code that serves many requests: log.warning("...", extra=about(...))."""
    return {"about": context}


def tenant_hash(tenant: str) -> str:
    """12 hex digits that represent a tenant's name in logs, equal in all services; empty for the default tenant."""
    return hashlib.blake2b(tenant.encode(), digest_size=_TENANT_HASH_BYTES).hexdigest() if tenant else ""
