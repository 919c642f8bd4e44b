"""Reasoning formats, and the choice of formats: detected from the chat template or named in a gateway's settings."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeVar

from gateway_svc.chat.tool_calls import harmony
from gateway_svc.chat.tool_calls.format_types import ReasoningFormat, ToolFormat
from gateway_svc.chat.tool_calls.tool_formats import ANSWER, RESPONSE, TOOL_FORMATS, is_harmony

F = TypeVar("F", "ToolFormat", "ReasoningFormat")

AUTO = "auto"
NONE = "none"

_RESPONSE = ("<response>", "</response>")
THINK, THINK_END = (("<think>",),), (("</think>",),)

_FORMATS = (
    ReasoningFormat(
        "think",
        lambda source: (
            ("<think>" in source or "</think>" in source)
            and not any(tag in source for tag in (ANSWER[0], _RESPONSE[0]))
        ),
        THINK,
        THINK_END,
    ),
    ReasoningFormat(
        "hunyuan", lambda source: "<think>" in source and ANSWER[0] in source, THINK, THINK_END, hidden=ANSWER
    ),
    ReasoningFormat("seed-oss", lambda source: "<seed:think>" in source, (("<seed:think>",),), (("</seed:think>",),)),
    ReasoningFormat("mistral", lambda source: "[THINK]" in source, (("[THINK]",),), (("[/THINK]",),)),
    ReasoningFormat(
        "command",
        lambda source: "<|START_THINKING|>" in source,
        (("<|START_THINKING|>",),),
        (("<|END_THINKING|>",),),
        hidden=RESPONSE,
    ),
    ReasoningFormat(
        "granite",
        lambda source: "Here is my thought process" in source,
        (("Here is my thought process:",), ("Here's my thought process:",)),
        (("Here is my response:",), ("Here's my response:",)),
    ),
    ReasoningFormat(
        "granite-3.3",
        lambda source: "<think>" in source and _RESPONSE[0] in source,
        THINK,
        THINK_END,
        hidden=_RESPONSE,
    ),
    ReasoningFormat(
        "gemma4",
        lambda source: "<|channel>" in source,
        (("<|channel>", "thought\n"),),
        (("<channel|>",),),
    ),
    ReasoningFormat(
        "harmony",
        is_harmony,
        ((harmony.CHANNEL, "analysis", harmony.MESSAGE),),
        ((harmony.END,),),
        after=(harmony.START, "assistant"),
        before_answer=(harmony.CHANNEL, "final", harmony.MESSAGE),
        has_channels=True,
    ),
)
REASONING_FORMATS: Mapping[str, ReasoningFormat] = {found.name: found for found in _FORMATS}


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
