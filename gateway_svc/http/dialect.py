"""What differs between the HTTP APIs in one response: the form of errors, and of the events of a stream."""

from collections.abc import Mapping
from typing import Any, Protocol

from gateway_svc.http import errors
from svc_common.errors import QuireError


class Dialect(Protocol):
    """An API's forms. `end_mark`: bytes that end a stream without an error."""

    end_mark: bytes

    def status(self, error: QuireError) -> int:
        """HTTP status of an error."""

    def error_body(self, error: QuireError) -> Mapping[str, Any]:
        """Body of a response that is an error."""

    def error_event(self, error: QuireError) -> Mapping[str, Any]:
        """Last event of a stream that fails."""

    def event_name(self, event: Mapping[str, Any]) -> str:
        """Value of the event's `event:` line; empty = the event has no such line."""


class OpenAIDialect:
    """Chat completions and completions: unnamed events, and a mark at the end."""

    end_mark = b"data: [DONE]\n\n"

    def status(self, error: QuireError) -> int:
        """HTTP status of an error, as listed in docs/errors.md."""
        return errors.http_status(error)

    def error_body(self, error: QuireError) -> Mapping[str, Any]:
        """OpenAI's error object."""
        return errors.error_body(error)

    def error_event(self, error: QuireError) -> Mapping[str, Any]:
        """OpenAI's error object."""
        return errors.error_body(error)

    def event_name(self, event: Mapping[str, Any]) -> str:
        """No name."""
        return ""


OPENAI = OpenAIDialect()
