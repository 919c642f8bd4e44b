"""Table of tool-call formats by model family.

A format is found by the chat template's source (`fits`), and exactly one fits the template of a known family.
"""

from collections.abc import Mapping
from functools import partial

from gateway_svc.chat.tool_calls import harmony
from gateway_svc.chat.tool_calls.format_types import CallSyntax, ToolFormat
from gateway_svc.chat.tool_calls.harmony import HarmonyParser
from gateway_svc.chat.tool_calls.literal_calls import LiteralParser
from gateway_svc.chat.tool_calls.literals import FUNCTION_GEMMA, GEMMA, PYTHON
from gateway_svc.chat.tool_calls.marked_calls import CallMarkup, MarkedParser
from gateway_svc.chat.tool_calls.pieces import ARGUMENTS, NAME, NUMBER, WORD
from gateway_svc.chat.tool_calls.tagged_formats import TAGGED_FORMATS, TOOL_CALL, TOOL_CALL_END

PYTHON_TAG, PYTHON_START, PYTHON_END = "<|python_tag|>", "<|python_start|>", "<|python_end|>"
TOOL_CALLS, ARGS, CALL_ID = "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"
ANSWER = ("<answer>", "</answer>")
RESPONSE = ("<|START_RESPONSE|>", "<|END_RESPONSE|>", "<|START_TEXT|>", "<|END_TEXT|>")
# Tags of other formats; their templates have `<tool_call>` too.
_OTHERS_TAGS = ("<function=", "<arg_key>", "<tool_calls>", '<invoke name="')
_BREAKS = "\r\n"
_OBJECT = ('{"name": "', NAME, '", "arguments": ', ARGUMENTS, "}")
_LLAMA3_OBJECT = ('{"name": "', NAME, '", "parameters": ', ARGUMENTS, "}")


def is_harmony(source: str) -> bool:
    """True for gpt-oss's templates."""
    return harmony.CHANNEL in source and harmony.MESSAGE in source


# --- JSON objects ----------------------------------------------------------------------------------------------------

HERMES = ToolFormat(
    "hermes",
    lambda source: TOOL_CALL in source and not any(tag in source for tag in _OTHERS_TAGS),
    partial(MarkedParser, CallMarkup((TOOL_CALL,), end=TOOL_CALL_END, lead=_BREAKS)),
    CallSyntax((TOOL_CALL, "\n", *_OBJECT, "\n", TOOL_CALL_END), between=("\n",)),
)
_LLAMA3 = ToolFormat(
    "llama3",
    lambda source: (
        (PYTHON_TAG in source or ("<|start_header_id|>" in source and '"parameters"' in source))
        and "<function=" not in source
    ),
    partial(MarkedParser, CallMarkup((PYTHON_TAG,), between=(";", PYTHON_TAG), at_start="{")),
    CallSyntax(_LLAMA3_OBJECT, between=("; ",)),
)
_GRANITE = ToolFormat(
    "granite",
    lambda source: "<|tool_call|>" in source and "<|/tool" not in source,
    partial(MarkedParser, CallMarkup(("<|tool_call|>",))),
    CallSyntax(_OBJECT, before=("<|tool_call|>", "["), between=(", ",), after=("]",)),
)
_PHI4 = ToolFormat(
    "phi4",
    lambda source: "<|/tool_call|>" in source or "<|/tool|>" in source,
    partial(MarkedParser, CallMarkup(("<|tool_call|>", "functools"), end="<|/tool_call|>")),
    CallSyntax(_OBJECT, before=("<|tool_call|>", "["), between=(", ",), after=("]", "<|/tool_call|>")),
)
_COMMAND = ToolFormat(
    "command",
    lambda source: "<|START_ACTION|>" in source,
    partial(MarkedParser, CallMarkup(("<|START_ACTION|>",), end="<|END_ACTION|>", hidden=RESPONSE)),
    CallSyntax(
        ('{"tool_call_id": "', NUMBER, '", "tool_name": "', NAME, '", "parameters": ', ARGUMENTS, "}"),
        before=("<|START_ACTION|>", "[\n    "),
        between=(",\n    ",),
        after=("\n]", "<|END_ACTION|>"),
    ),
)
_HUNYUAN = ToolFormat(
    "hunyuan",
    lambda source: "<tool_calls>" in source,
    partial(MarkedParser, CallMarkup(("<tool_calls>",), end="</tool_calls>", lead=_BREAKS, hidden=ANSWER)),
    CallSyntax(_OBJECT, before=("<tool_calls>", "["), between=(", ",), after=("]", "</tool_calls>")),
)
_NEMOTRON = ToolFormat(
    "nemotron",
    lambda source: "<TOOLCALL>" in source,
    partial(MarkedParser, CallMarkup(("<TOOLCALL>",), end="</TOOLCALL>", lead=_BREAKS)),
    CallSyntax(_OBJECT, before=("<TOOLCALL>", "["), between=(", ",), after=("]", "</TOOLCALL>")),
)

# --- a name before JSON arguments ------------------------------------------------------------------------------------

_MISTRAL_MARKUP = CallMarkup((TOOL_CALLS,), head=(NAME, (CALL_ID, WORD), (ARGS,)))
# Mistral's templates refuse ids of another length.
_MISTRAL = ToolFormat(
    "mistral",
    lambda source: TOOL_CALLS in source and ARGS not in source,
    partial(MarkedParser, _MISTRAL_MARKUP),
    CallSyntax(_OBJECT, before=(TOOL_CALLS, "["), between=(", ",), after=("]",)),
    id_prefix="",
    num_id_chars=9,
)
_MISTRAL_ARGS = ToolFormat(
    "mistral-args",
    lambda source: TOOL_CALLS in source and ARGS in source,
    partial(MarkedParser, _MISTRAL_MARKUP),
    CallSyntax((TOOL_CALLS, NAME, ARGS, ARGUMENTS)),
    id_prefix="",
    num_id_chars=9,
)
_DS_CALLS, _DS_CALLS_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
_DS_CALL, _DS_CALL_END, _DS_SEP = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁sep｜>"
_DEEPSEEK_V3 = ToolFormat(
    "deepseek-v3",
    lambda source: _DS_CALLS in source and "```json" in source,
    partial(
        MarkedParser,
        CallMarkup(
            (_DS_CALLS,),
            head=(_DS_CALL, "function", _DS_SEP, NAME, "```json"),
            tail=("```", _DS_CALL_END),
            end=_DS_CALLS_END,
        ),
    ),
    CallSyntax(
        (_DS_CALL, "function", _DS_SEP, NAME, "\n```json\n", ARGUMENTS, "\n```", _DS_CALL_END),
        before=(_DS_CALLS,),
        between=("\n",),
        after=(_DS_CALLS_END,),
    ),
)
_DEEPSEEK_V31 = ToolFormat(
    "deepseek-v3.1",
    lambda source: _DS_CALLS in source and "```json" not in source,
    partial(
        MarkedParser,
        CallMarkup((_DS_CALLS,), head=(_DS_CALL, NAME, _DS_SEP), tail=(_DS_CALL_END,), end=_DS_CALLS_END),
    ),
    CallSyntax(
        (_DS_CALL, NAME, _DS_SEP, ARGUMENTS, _DS_CALL_END),
        before=(_DS_CALLS,),
        after=(_DS_CALLS_END,),
    ),
)
_KIMI_CALLS, _KIMI_CALLS_END = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
_KIMI_CALL, _KIMI_CALL_END = "<|tool_call_begin|>", "<|tool_call_end|>"
_KIMI_ARGUMENTS = "<|tool_call_argument_begin|>"
# Kimi's templates write the ids of calls, which are those that the model wrote.
_KIMI = ToolFormat(
    "kimi-k2",
    lambda source: _KIMI_CALLS in source,
    partial(
        MarkedParser,
        CallMarkup(
            (_KIMI_CALLS,),
            head=(_KIMI_CALL, ("functions.",), NAME, ":", NUMBER, _KIMI_ARGUMENTS),
            tail=(_KIMI_CALL_END,),
            end=_KIMI_CALLS_END,
            call_id=f"functions.{NAME}:{NUMBER}",
        ),
    ),
    CallSyntax(
        (_KIMI_CALL, "functions.", NAME, ":", NUMBER, _KIMI_ARGUMENTS, ARGUMENTS, _KIMI_CALL_END),
        before=(_KIMI_CALLS,),
        after=(_KIMI_CALLS_END,),
    ),
)
_HARMONY = ToolFormat(
    "harmony",
    is_harmony,
    HarmonyParser,
    CallSyntax(
        (
            harmony.CHANNEL,
            "commentary to=functions.",
            NAME,
            " ",
            harmony.CONSTRAIN,
            "json",
            harmony.MESSAGE,
            ARGUMENTS,
        ),
        is_single=True,
    ),
)

# --- arguments that are literals -------------------------------------------------------------------------------------

_LLAMA4 = ToolFormat(
    "llama4",
    lambda source: "<|header_start|>" in source,
    partial(
        LiteralParser,
        CallMarkup((PYTHON_START,), head=(NAME,), tail=(")",), between=(";",), end=PYTHON_END, at_start="[{"),
        PYTHON,
    ),
    CallSyntax(_LLAMA3_OBJECT, between=("; ",)),
)
_OLMO3 = ToolFormat(
    "olmo3",
    lambda source: "<function_calls>" in source,
    partial(
        LiteralParser,
        CallMarkup(("<function_calls>",), head=(NAME,), tail=(")",), end="</function_calls>", lead=_BREAKS),
        PYTHON,
    ),
    CallSyntax((NAME, "(", ARGUMENTS, ")\n"), before=("<function_calls>", "\n"), after=("</function_calls>",)),
)
_LFM2 = ToolFormat(
    "lfm2",
    lambda source: "<|tool_call_start|>" in source or "<|tool_list_start|>" in source,
    partial(
        LiteralParser,
        CallMarkup(("<|tool_call_start|>",), head=(NAME,), tail=(")",), end="<|tool_call_end|>"),
        PYTHON,
    ),
    CallSyntax(
        (NAME, "(", ARGUMENTS, ")"),
        before=("<|tool_call_start|>", "["),
        between=(", ",),
        after=("]", "<|tool_call_end|>"),
    ),
)
_GEMMA3 = ToolFormat(
    "gemma3",
    lambda source: "```tool_code" in source,
    partial(LiteralParser, CallMarkup(("```tool_code",), head=(NAME,), tail=(")",), end="```", lead=_BREAKS), PYTHON),
    CallSyntax((NAME, "(", ARGUMENTS, ")\n"), before=("```tool_code\n",), after=("```",)),
)
_GEMMA4 = ToolFormat(
    "gemma4",
    lambda source: "<|tool_call>" in source,
    partial(LiteralParser, CallMarkup(("<|tool_call>",), head=("call:", NAME), end="<tool_call|>"), GEMMA),
    CallSyntax(("<|tool_call>", "call:", NAME, ARGUMENTS, "<tool_call|>")),
)
_FUNCTION_GEMMA = ToolFormat(
    "functiongemma",
    lambda source: "<start_function_call>" in source,
    partial(
        LiteralParser,
        CallMarkup(("<start_function_call>",), head=("call:", NAME), end="<end_function_call>"),
        FUNCTION_GEMMA,
    ),
    CallSyntax(("<start_function_call>", "call:", NAME, ARGUMENTS, "<end_function_call>")),
)

_FORMATS = (
    *(HERMES, _LLAMA3, _GRANITE, _PHI4, _COMMAND, _HUNYUAN, _NEMOTRON),
    *(_MISTRAL, _MISTRAL_ARGS, _DEEPSEEK_V3, _DEEPSEEK_V31, _KIMI, _HARMONY),
    *TAGGED_FORMATS,
    *(_LLAMA4, _OLMO3, _LFM2, _GEMMA3, _GEMMA4, _FUNCTION_GEMMA),
)
TOOL_FORMATS: Mapping[str, ToolFormat] = {found.name: found for found in _FORMATS}
