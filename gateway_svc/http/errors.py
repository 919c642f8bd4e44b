"""Errors in OpenAI's form: status, type, code, parameter name, and retry headers."""

import math
import re
from collections.abc import Callable
from typing import Any

from svc_common.errors import InvalidArgument, QuireError

DROPPED_HEADER = "x-llm-d-request-dropped-reason"
_HTTP_STATUSES = {
    "RESUME_EXPIRED": 410,
    "METHOD_NOT_ALLOWED": 405,
    "HEADER_TOO_LARGE": 431,
    "REQUEST_TOO_SLOW": 408,
    "UNSUPPORTED_MEDIA_TYPE": 415,
}
_CODES = {
    "PROMPT_TOO_LONG": "context_length_exceeded",
    "MODEL_NOT_FOUND": "model_not_found",
    "MISSING_KEY": "invalid_api_key",
    "UNKNOWN_KEY": "invalid_api_key",
    "EXPIRED_KEY": "invalid_api_key",
    "TENANT_QUOTA": "rate_limit_exceeded",
}
_TYPES = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 429: "rate_limit_error"}
_GROUPS = re.compile(r"^(sampling\.beam|sampling|stop|response|scheduling|cache|structured_output)\.")
_INDEX = re.compile(r"\[\d+\].*$")
_PARAMS = {
    "stop_strings": "stop",
    "text": "prompt",
    "token_ids.ids": "prompt",
    "inputs": "input",
    "json_schema": "response_format",
    "regex": "guided_regex",
    "choice": "guided_choice",
    "lark": "guided_grammar",
    "labels": "metadata",
    "template_arguments_json": "chat_template_kwargs",
    "tool_choice.name": "tool_choice",
    "tool_choice.mode": "tool_choice",
    "num_prompt_logprobs": "prompt_logprobs",
    "num_top_logprobs": "top_logprobs",
}
_INSIDE = (
    (re.compile(r"^(tools\[\d+\])\.parameters_json"), r"\1.function.parameters"),
    (re.compile(r"^(tools\[\d+\])\.(name|description)"), r"\1.function.\2"),
    (re.compile(r"^(messages\[\d+\]\.tool_calls\[\d+\])\.(name|arguments)"), r"\1.function.\2"),
    (re.compile(r"^(messages\[\d+\])\.reasoning\b"), r"\1.reasoning_content"),
)
# By reason, in the words of llm-d's router, which clients and outer routers branch on.
_DROPPED = {
    "QUEUE_FULL": "rejected-saturated",
    "GATEWAY_FULL": "rejected-saturated",
    "DRAINING": "rejected-shutting-down",
    "NO_WORKER": "rejected-no-endpoints",
    "NO_MODEL": "rejected-no-endpoints",
    "SCHEDULER_AWAY": "rejected-no-endpoints",
    "EXPIRED_IN_QUEUE": "rejected-ttl-expired",
    "INFEASIBLE": "rejected-ttl-expired",
}
# Errors that would repeat unchanged; OpenAI's packages otherwise retry 409 and 5xx.
_FINAL = frozenset({"ALREADY_EXISTS", "FAILED_PRECONDITION", "DEADLINE_EXCEEDED", "UNIMPLEMENTED"})


class BodyTooLarge(InvalidArgument):
    """The request body exceeds the limit."""

    http_status = 413


def http_status(error: QuireError) -> int:
    """HTTP status of an error, as listed in docs/errors.md."""
    return _HTTP_STATUSES.get(error.reason, error.http_status)


def error_body(error: QuireError) -> dict[str, Any]:
    """OpenAI's error object."""
    status = http_status(error)
    default = "server_error" if status >= 500 else "invalid_request_error"
    return {
        "error": {
            "message": public_message(error, without_group),
            "type": _TYPES.get(status, default),
            "param": param_of(error.violations[0].field) if error.violations else None,
            "code": _CODES.get(error.reason, error.reason.lower()),
        }
    }


def public_message(error: QuireError, name: Callable[[str], str]) -> str:
    """Message with the API's names of fields: a client that sent `temperature` reads `temperature`."""
    message = error.message
    for violation in error.violations:
        message = message.replace(f"{violation.field}: ", f"{name(violation.field)}: ", 1)
    return message


def without_group(field: str) -> str:
    """Field path without the proto's group: `temperature` of `sampling.temperature`."""
    return _GROUPS.sub("", field)


def error_headers(error: QuireError) -> dict[str, str]:
    """Retry headers of an error, and why a request was dropped before it ran, for routers.

    The time is given in whole seconds and in milliseconds, which OpenAI's packages prefer; other headers say
    that a retry is useless.
    """
    dropped = _DROPPED.get(error.reason)
    return _retry_headers(error) | ({DROPPED_HEADER: dropped} if dropped else {})


def _retry_headers(error: QuireError) -> dict[str, str]:
    if error.status == "UNAUTHENTICATED":
        return {"www-authenticate": "Bearer"}
    if error.retry_after_s is not None:
        milliseconds = max(1, math.ceil(1_000 * error.retry_after_s))
        return {"retry-after": str(max(1, math.ceil(error.retry_after_s))), "retry-after-ms": str(milliseconds)}
    return {"x-should-retry": "false"} if error.status in _FINAL else {}


def param_of(field: str) -> str:
    """OpenAI's parameter name of a field path; positions inside messages and tools are kept."""
    field = without_group(field)
    for pattern, replacement in _INSIDE:
        field = pattern.sub(replacement, field)
    if field.startswith(("messages[", "tools[")):
        return field
    base = _INDEX.sub("", field)
    return _PARAMS.get(base, base)
