"""Errors in Anthropic's form: type, message, the reason as `error_code`, and the request's id."""

import re
from typing import Any

from gateway_svc.http.errors import http_status, public_message, without_group
from svc_common.errors import QuireError

# Anthropic's list of errors; it answers 529 where others, and this server, answer 503.
_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    409: "conflict_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}
_NAMES = (
    (re.compile(r"^stop_strings\b"), "stop_sequences"),
    (re.compile(r"^(tools\[\d+\])\.parameters_json"), r"\1.input_schema"),
    (re.compile(r"^tool_choice\.mode"), "tool_choice"),
    (re.compile(r"^json_schema"), "output_config.format.schema"),
    (re.compile(r"^template_arguments_json"), "chat_template_kwargs"),
    (re.compile(r"^continue_final_message"), "messages"),
)


def error_body(error: QuireError, request_id: str) -> dict[str, Any]:
    """Anthropic's error object. `request_id`: empty = the request has none yet."""
    status = http_status(error)
    default = "api_error" if status >= 500 else "invalid_request_error"
    return {
        "type": "error",
        "error": {
            "type": _TYPES.get(status, default),
            "message": _message(error),
            "details": {"error_code": error.reason.lower()},
        },
        "request_id": request_id or None,
    }


def _message(error: QuireError) -> str:
    """Message. Of a prompt that is too long it has Anthropic's wording, by which agents know that they must shorten it."""
    if error.reason == "PROMPT_TOO_LONG" and {"prompt_tokens", "limit"} <= error.metadata.keys():
        return f"prompt is too long: {error.metadata['prompt_tokens']} tokens > {error.metadata['limit']} maximum"
    return public_message(error, field_name)


def field_name(field: str) -> str:
    """Anthropic's name of a field path of the ChatRequest that a Messages request becomes."""
    field = without_group(field)
    for pattern, name in _NAMES:
        field = pattern.sub(name, field)
    return field
