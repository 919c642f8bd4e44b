"""Choice of the formats of tool calls and reasoning: detected from the chat template or named in a gateway's settings."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeVar

from gateway_svc.chat.tool_calls.format_types import ReasoningFormat, ToolFormat
from gateway_svc.chat.tool_calls.reasoning_formats import REASONING_FORMATS
from gateway_svc.chat.tool_calls.tool_formats import TOOL_FORMATS

F = TypeVar("F", "ToolFormat", "ReasoningFormat")

AUTO = "auto"
NONE = "none"


@dataclass(frozen=True, slots=True)
class FormatChoice:
    """Formats chosen by the operator: a name, `auto` = detect from the chat template, `none` = parse nothing."""

    tool_parser: str = AUTO
    reasoning_parser: str = AUTO

    def tools(self, template: str) -> ToolFormat | None:
        """Tool-call format for a chat template; None = unknown."""
        return _chosen(self.tool_parser, TOOL_FORMATS, template)

    def reasoning(self, template: str) -> ReasoningFormat | None:
        """Reasoning format for a chat template; None = unknown."""
        return _chosen(self.reasoning_parser, REASONING_FORMATS, template)


def _chosen(name: str, formats: Mapping[str, F], template: str) -> F | None:
    if name == AUTO:
        return next((found for found in formats.values() if found.fits(template)), None)
    return formats.get(name)
