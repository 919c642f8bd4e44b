"""Routes that need a caller. Each is an ASGI application, so that it notices a disconnect while it waits."""

import asyncio
import contextlib
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from opentelemetry.trace import Span
from starlette.datastructures import Headers, QueryParams
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from gateway_svc import spans
from gateway_svc.calls import Call, CallIntake, ClientGone
from gateway_svc.http.dialect import Dialect, dialect_of
from gateway_svc.http.disconnects import until_disconnect
from gateway_svc.http.io import Reply, check_is_json, read_away, read_body
from gateway_svc.metrics import GatewayMetrics
from gateway_svc.request_ids import accept_request_id
from gateway_svc.spans import CallSpans
from gateway_svc.stalled_clients import until_left_unread
from svc_common.errors import InvalidArgument, QuireError
from svc_common.net import rpc
from svc_common.observability import log_context, telemetry
from svc_common.observability import trace_names as names
from svc_common.observability.log_context import LogContext

_SAYING_S = 1.0
TIMEOUT_HEADER = "x-request-timeout-ms"
_MAX_TIMEOUT_DIGITS = 12


@dataclass(slots=True)
class HttpRequest:
    """A request as received. `body`: empty for GET. `path_params`: named parts of the route's path. `query`: after it."""

    body: bytes
    path_params: Mapping[str, str] = field(default_factory=dict)
    headers: Mapping[str, str] = field(default_factory=dict)
    query: Mapping[str, str] = field(default_factory=dict)

    def take_body(self) -> bytes:
        """Return the body and release it here, since answers may stream for minutes."""
        body, self.body = self.body, b""
        return body


Respond = Callable[[HttpRequest, Call, Reply], Coroutine[Any, Any, None]]


class Doorman:
    """Makes routes that first identify the caller, request id and deadline of each call."""

    def __init__(self, intake: CallIntake, call_spans: CallSpans, metrics: GatewayMetrics) -> None:
        self._intake = intake
        self._spans = call_spans
        self._metrics = metrics

    def route(
        self, method: str, path: str, respond: Respond, dialect: Dialect | None = None, *, has_body: bool | None = None
    ) -> Route:
        """Make a route; `respond(request, call, reply)` answers, or raises a QuireError.

        `dialect`: default: that of each request (`dialect_of`). `has_body`: requests must be sent as JSON; default: for POST.
        """
        is_json = method == "POST" if has_body is None else has_body
        endpoint = _Endpoint(method, path, respond, dialect, self._intake, self._spans, self._metrics, is_json=is_json)
        return Route(path, endpoint, methods=[method])


class _Endpoint:
    """ASGI application of one route."""

    def __init__(
        self,
        method: str,
        route: str,
        respond: Respond,
        dialect: Dialect | None,
        intake: CallIntake,
        call_spans: CallSpans,
        metrics: GatewayMetrics,
        *,
        is_json: bool,
    ) -> None:
        self._is_json = is_json
        self._method = method
        self._route = route
        self._respond = respond
        self._dialect = dialect
        self._intake = intake
        self._spans = call_spans
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer, or report the error; on a disconnect the whole request ends at once."""
        headers = Headers(scope=scope)
        reply = Reply(send, self._dialect or dialect_of(scope["path"], headers))
        span = self._spans.server(f"{self._method} {self._route}", headers, self._attributes(scope))
        ended_by: Exception | None = None
        is_taken_in = False
        try:
            call = self._call(headers, span, reply)
            is_taken_in = True
            query = QueryParams(scope.get("query_string", b""))
            request = HttpRequest(await read_body(receive), scope.get("path_params", {}), headers, query)
            span.add_event(names.RECEIVED, {names.HTTP_BODY_SIZE: len(request.body)})
            async with until_left_unread(call):
                await until_disconnect(receive, self._respond(request, call, reply))
        except ClientGone as error:
            ended_by = error
            spans.set_error(span, error)
        except Exception as error:
            ended_by = known = error if isinstance(error, QuireError) else rpc.hide(error)
            spans.set_error(span, known)
            if not is_taken_in:
                await read_away(receive)
            await _say(reply, known)
        finally:
            span.set_attribute(names.HTTP_STATUS, reply.status)
            span.end()
            self._metrics.call_ended("http", f"{self._method} {self._route}", ended_by)

    def _attributes(self, scope: Scope) -> dict[str, str | int]:
        attributes = {names.HTTP_METHOD: self._method, names.HTTP_PATH: scope["path"], names.HTTP_ROUTE: self._route}
        if server := scope.get("server"):
            attributes[names.SERVER_ADDRESS], attributes[names.SERVER_PORT] = server
        return attributes

    def _call(self, headers: Mapping[str, str], span: Span, reply: Reply) -> Call:
        if trace_id := telemetry.trace_id(span):
            reply.headers["x-trace-id"] = trace_id
        call = self._intake.accept(headers, remaining_s(headers), span, stream=False)
        reply.headers["x-request-id"] = call.request_id
        spans.set_request_id(span, call.request_id)
        if self._is_json:
            check_is_json(headers)
        return call


async def _say(reply: Reply, error: QuireError) -> None:
    """Send the error, and give up on a client that does not read."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(_SAYING_S):
            await reply.error(error)


def named(call: Call, request_id: str | None, reply: Reply) -> Call:
    """`call` under the id in a body (vLLM's `request_id`), unless a header names it. Raises InvalidArgument for a malformed id."""
    if not request_id or call.is_named:
        return call
    call = replace(call, request_id=accept_request_id(request_id, "request_id"), is_named=True)
    reply.headers["x-request-id"] = call.request_id
    spans.set_request_id(call.span, call.request_id)
    log_context.enter(LogContext.of(request_id=call.request_id, tenant=call.caller.tenant, span=call.span))
    return call


def remaining_s(headers: Mapping[str, str]) -> float | None:
    """Seconds until the deadline in the headers; None = none.

    Raises InvalidArgument unless it is a whole number of milliseconds.
    """
    given = headers.get(TIMEOUT_HEADER)
    if given is None:
        return None
    if not (given.isascii() and given.isdigit() and len(given) <= _MAX_TIMEOUT_DIGITS and int(given) > 0):
        raise InvalidArgument.field(TIMEOUT_HEADER, "must be a whole number of milliseconds, at least 1")
    return int(given) / 1_000
