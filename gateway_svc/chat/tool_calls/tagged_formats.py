"""Table of the tool-call formats with parameters in tags, by model family."""

from functools import partial

from gateway_svc.chat.tool_calls.format_types import CallSyntax, ToolFormat
from gateway_svc.chat.tool_calls.parameter_grammar import ParameterSyntax
from gateway_svc.chat.tool_calls.pieces import ARGUMENTS, KEY, NAME, WORD
from gateway_svc.chat.tool_calls.tagged_calls import TaggedParser, TagMarkup

TOOL_CALL, TOOL_CALL_END = "<tool_call>", "</tool_call>"
_BREAKS = "\r\n"

_QWEN3_CODER = ToolFormat(
    "qwen3-coder",
    lambda source: TOOL_CALL in source and "<function=" in source,
    partial(
        TaggedParser,
        TagMarkup(
            (TOOL_CALL,),
            head=("<function=", NAME, ">"),
            tail=("</function>",),
            end=TOOL_CALL_END,
            lead=_BREAKS,
            key=("<parameter=", KEY, ">"),
            close="</parameter>",
            is_padded=True,
        ),
    ),
    CallSyntax(
        (TOOL_CALL, "\n<function=", NAME, ">\n", ARGUMENTS, "</function>\n", TOOL_CALL_END),
        between=("\n",),
        parameter=ParameterSyntax(("<parameter=", KEY, ">\n"), "</parameter>", pad="\n"),
    ),
)
_GLM = ToolFormat(
    "glm",
    lambda source: TOOL_CALL in source and "<arg_key>" in source,
    partial(
        TaggedParser,
        TagMarkup(
            (TOOL_CALL,),
            head=(NAME,),
            end=TOOL_CALL_END,
            lead=_BREAKS,
            key=("<arg_key>", KEY, "</arg_key>", "<arg_value>"),
            close="</arg_value>",
        ),
    ),
    CallSyntax(
        (TOOL_CALL, NAME, "\n", ARGUMENTS, TOOL_CALL_END),
        between=("\n",),
        parameter=ParameterSyntax(("<arg_key>", KEY, "</arg_key>", "\n", "<arg_value>"), "</arg_value>"),
    ),
)
_MINIMAX = ToolFormat(
    "minimax-m2",
    lambda source: "<minimax:tool_call>" in source,
    partial(
        TaggedParser,
        TagMarkup(
            ("<minimax:tool_call>",),
            head=('<invoke name="', NAME, '">'),
            tail=("</invoke>",),
            end="</minimax:tool_call>",
            lead=_BREAKS,
            key=('<parameter name="', KEY, '">'),
            close="</parameter>",
        ),
    ),
    CallSyntax(
        ('<invoke name="', NAME, '">\n', ARGUMENTS, "</invoke>\n"),
        before=("<minimax:tool_call>", "\n"),
        after=("</minimax:tool_call>",),
        parameter=ParameterSyntax(('<parameter name="', KEY, '">'), "</parameter>"),
    ),
)
_SEED_OSS = ToolFormat(
    "seed-oss",
    lambda source: "<seed:tool_call>" in source,
    partial(
        TaggedParser,
        TagMarkup(
            ("<seed:tool_call>",),
            head=("<function=", NAME, ">"),
            tail=("</function>",),
            end="</seed:tool_call>",
            lead=_BREAKS,
            key=("<parameter=", KEY, ">"),
            close="</parameter>",
        ),
    ),
    CallSyntax(
        ("<seed:tool_call>", "\n<function=", NAME, ">\n", ARGUMENTS, "</function>\n", "</seed:tool_call>"),
        between=("\n",),
        parameter=ParameterSyntax(("<parameter=", KEY, ">"), "</parameter>"),
    ),
)
_DSML = "｜DSML｜"


def _dsml(name: str, block: str) -> ToolFormat:
    """DeepSeek's markup. `block`: name of the tag around all calls, which templates write apart from the token before it."""
    begin, end, close = f"<{_DSML}{block}>", f"</{_DSML}{block}>", f"</{_DSML}parameter>"
    key = (f'<{_DSML}parameter name="', KEY, '" string="', WORD, '">')
    return ToolFormat(
        name,
        lambda source: _DSML in source and f"{block}>" in source,
        partial(
            TaggedParser,
            TagMarkup(
                (begin,),
                head=("<", _DSML, 'invoke name="', NAME, '">'),
                tail=(f"</{_DSML}invoke>",),
                end=end,
                lead=_BREAKS,
                key=key,
                close=close,
            ),
        ),
        CallSyntax(
            (f'<{_DSML}invoke name="', NAME, '">\n', ARGUMENTS, f"</{_DSML}invoke>\n"),
            before=(begin, "\n"),
            after=(end,),
            parameter=ParameterSyntax(key, close),
        ),
    )


_DEEPSEEK_V32, _DEEPSEEK_V4 = _dsml("deepseek-v3.2", "function_calls"), _dsml("deepseek-v4", "tool_calls")
_STEP_CALLS, _STEP_CALLS_END = "<｜tool_calls_begin｜>", "<｜tool_calls_end｜>"
_STEP_CALL, _STEP_CALL_END, _STEP_SEP = "<｜tool_call_begin｜>", "<｜tool_call_end｜>", "<｜tool_sep｜>"
_STEP3 = ToolFormat(
    "step3",
    lambda source: "<steptml:" in source,
    partial(
        TaggedParser,
        TagMarkup(
            (_STEP_CALLS,),
            head=(_STEP_CALL, "function", _STEP_SEP, '<steptml:invoke name="', NAME, '">'),
            tail=("</steptml:invoke>", _STEP_CALL_END),
            end=_STEP_CALLS_END,
            key=('<steptml:parameter name="', KEY, '">'),
            close="</steptml:parameter>",
        ),
    ),
    CallSyntax(
        (
            _STEP_CALL,
            "function",
            _STEP_SEP,
            '<steptml:invoke name="',
            NAME,
            '">',
            ARGUMENTS,
            "</steptml:invoke>",
            _STEP_CALL_END,
        ),
        before=(_STEP_CALLS,),
        after=(_STEP_CALLS_END,),
        parameter=ParameterSyntax(('<steptml:parameter name="', KEY, '">'), "</steptml:parameter>", after=()),
    ),
)

TAGGED_FORMATS = (_QWEN3_CODER, _GLM, _MINIMAX, _SEED_OSS, _DEEPSEEK_V32, _DEEPSEEK_V4, _STEP3)
