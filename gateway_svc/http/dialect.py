"""What differs between the HTTP APIs in one response: the form of errors, and of the events of a stream."""

from collections.abc import Mapping
from typing import Any, Protocol

from gateway_svc.http import anthropic_errors, errors
from svc_common.errors import QuireError

_MESSAGES = "/v1/messages"
VERSION_HEADER = "anthropic-version"


class Dialect(Protocol):
    """An API's forms. `end_mark`: bytes that end a stream without an error."""

    end_mark: bytes

    def error_body(self, error: QuireError, request_id: str) -> Mapping[str, Any]:
        """Body of a response that is an error. `request_id`: empty = the request has none yet."""

    def error_event(self, error: QuireError, request_id: str) -> Mapping[str, Any]:
        """Last event of a stream that fails."""

    def event_name(self, event: Mapping[str, Any]) -> str:
        """Value of the event's `event:` line; empty = the event has no such line."""


class OpenAIDialect:
    """Chat completions and completions: unnamed events, and a mark at the end."""

    end_mark = b"data: [DONE]\n\n"

    def error_body(self, error: QuireError, request_id: str) -> Mapping[str, Any]:
        """OpenAI's error object, which has no request id."""
        return errors.error_body(error)

    def error_event(self, error: QuireError, request_id: str) -> Mapping[str, Any]:
        """OpenAI's error object."""
        return errors.error_body(error)

    def event_name(self, event: Mapping[str, Any]) -> str:
        """No name."""
        return ""


class AnthropicDialect:
    """Messages: events named by their type, the last of which ends the stream."""

    end_mark = b""

    def error_body(self, error: QuireError, request_id: str) -> Mapping[str, Any]:
        """Anthropic's error object."""
        return anthropic_errors.error_body(error, request_id)

    def error_event(self, error: QuireError, request_id: str) -> Mapping[str, Any]:
        """Anthropic's `error` event."""
        return anthropic_errors.error_body(error, request_id)

    def event_name(self, event: Mapping[str, Any]) -> str:
        """The event's type."""
        return str(event["type"])


OPENAI = OpenAIDialect()
ANTHROPIC = AnthropicDialect()


def speaks_anthropic(path: str, headers: Mapping[str, str]) -> bool:
    """True for paths of Anthropic's API, and for requests with its version header, which all its packages send."""
    return VERSION_HEADER in headers or path == _MESSAGES or path.startswith(f"{_MESSAGES}/")


def dialect_of(path: str, headers: Mapping[str, str]) -> Dialect:
    """Dialect of a request: Anthropic's where it speaks that, else OpenAI's."""
    return ANTHROPIC if speaks_anthropic(path, headers) else OPENAI
