"""Table of reasoning formats by model family."""

from collections.abc import Mapping

from gateway_svc.chat.tool_calls import harmony
from gateway_svc.chat.tool_calls.format_types import ReasoningFormat
from gateway_svc.chat.tool_calls.tool_formats import ANSWER, RESPONSE, is_harmony

THINK, THINK_END = (("<think>",),), (("</think>",),)

_FORMATS = (
    ReasoningFormat(
        "think",
        lambda source: ("<think>" in source or "</think>" in source) and ANSWER[0] not in source,
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
