"""Forms of the Responses API: named events, no end mark, and its names of fields in errors. Pure."""

import re
from collections.abc import Mapping
from typing import Any

from gateway_svc.http import errors
from svc_common.errors import QuireError

_NAMES = (
    (re.compile(r"^(input\[.*)"), r"\1"),
    (re.compile(r"^messages\b.*"), "input"),
    (re.compile(r"^stop\.max_tokens$"), "max_output_tokens"),
    (re.compile(r"^(?:structured_output\.)?json_schema\b.*"), "text.format"),
    (re.compile(r"^(tools\[\d+\])\.(?:parameters_json|function\.parameters)"), r"\1.parameters"),
)
"""Fields of the request behind the API, and this API's names; others are those of chats."""


class ResponseDialect:
    """The Responses API's forms."""

    end_mark = b""

    def error_body(self, error: QuireError, request_id: str) -> Mapping[str, Any]:
        """OpenAI's error object, with the names of this API's fields."""
        inner = errors.error_body(error)["error"]
        for violation in error.violations:
            inner["message"] = _with_name(inner["message"], violation.field)
        if error.violations:
            inner["param"] = _param(error.violations[0].field)
        return {"error": inner}

    def error_event(self, error: QuireError, request_id: str) -> Mapping[str, Any]:
        """The event `error`, for errors that no `response.failed` tells."""
        inner = self.error_body(error, request_id)["error"]
        fields = {name: inner[name] for name in ("code", "message", "param")}
        return {"type": "error", **fields, "sequence_number": 0}

    def event_name(self, event: Mapping[str, Any]) -> str:
        """Its type."""
        return str(event["type"])


def _param(field: str) -> str:
    for pattern, name in _NAMES:
        if pattern.match(field):
            return pattern.sub(name, field)
    return errors.param_of(field)


def _with_name(message: str, field: str) -> str:
    """The message with this API's name of `field`, which chats tell with or without its first part."""
    for told in (field, field.partition(".")[2]):
        if told and f"{told}: " in message:
            return message.replace(f"{told}: ", f"{_param(field)}: ", 1)
    return message


RESPONSES = ResponseDialect()
