"""The request id in a body, as vLLM's API has it: it names the request where no header does."""

from dataclasses import replace

from gateway_svc.calls import Call
from gateway_svc.http.io import Reply
from gateway_svc.request_ids import accept_request_id
from gateway_svc.spans import set_request_id
from svc_common.observability import log_context
from svc_common.observability.log_context import LogContext


def named(call: Call, request_id: str | None, reply: Reply) -> Call:
    """`call` under the id of the body, unless a header names it. Raises InvalidArgument for a malformed id."""
    if not request_id or call.is_named:
        return call
    call = replace(call, request_id=accept_request_id(request_id, "request_id"), is_named=True)
    reply.headers["x-request-id"] = call.request_id
    set_request_id(call.span, call.request_id)
    log_context.enter(LogContext.of(request_id=call.request_id, tenant=call.caller.tenant, span=call.span))
    return call
