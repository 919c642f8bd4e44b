"""The formats that are built in, and which one a chat template writes. A gateway's settings may name others than those found."""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from gateway_svc.chat import thinking
from gateway_svc.chat.tool_calls.call_formats import (
    ARGS,
    HERMES_CLOSE,
    HERMES_OPEN,
    PYTHON_TAG,
    TOOL_CALLS,
    HermesParser,
    Llama3Parser,
    MistralParser,
)
from gateway_svc.chat.tool_calls.call_parser import CallParser, CallRules

F = TypeVar("F", "ToolFormat", "ReasoningFormat")

AUTO = "auto"
NONE = "none"


@dataclass(frozen=True, slots=True)
class CallSyntax:
    """How forced calls are written: texts and markers in order, NAME and ARGUMENTS for what is in their place.

    `before` and `after` the calls, `between` two of them.
    """

    call: Sequence[str]
    between: Sequence[str]
    before: Sequence[str] = ()
    after: Sequence[str] = ()


NAME, ARGUMENTS = "{name}", "{arguments}"


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """How a family of models calls tools. `fits`: whether a chat template's source is of that family."""

    name: str
    fits: Callable[[str], bool]
    parser: Callable[[CallRules], CallParser]
    syntax: CallSyntax
    id_prefix: str = "call_"
    num_id_chars: int = 24

    @property
    def head(self) -> str:
        """What forced calls begin with. Of an object the brace alone: beside an answer that is JSON it may have white space."""
        first = (*self.syntax.before, *self.syntax.call)[0]
        return first[0] if first.startswith("{") else first

    def call_id(self, seed: str) -> str:
        """An id of the family's shape, a function of `seed`."""
        return self.id_prefix + hashlib.sha256(seed.encode()).hexdigest()[: self.num_id_chars]


@dataclass(frozen=True, slots=True)
class ReasoningFormat:
    """How a family of models marks what it thinks."""

    name: str
    fits: Callable[[str], bool]
    begin: str
    end: str

    def is_open(self, prompt: str) -> bool:
        """Whether the prompt's end has opened it."""
        return prompt.rstrip().endswith(self.begin)


HERMES = ToolFormat(
    "hermes",
    lambda source: HERMES_OPEN in source and "<function=" not in source,
    HermesParser,
    CallSyntax(
        call=(HERMES_OPEN, '\n{"name": "', NAME, '", "arguments": ', ARGUMENTS, "}\n", HERMES_CLOSE), between=("\n",)
    ),
)
LLAMA3 = ToolFormat(
    "llama3",
    lambda source: PYTHON_TAG in source or ("<|start_header_id|>" in source and '"parameters"' in source),
    Llama3Parser,
    CallSyntax(call=('{"name": "', NAME, '", "parameters": ', ARGUMENTS, "}"), between=("; ",)),
)
# Its templates refuse ids of another length.
MISTRAL = ToolFormat(
    "mistral",
    lambda source: TOOL_CALLS in source and ARGS not in source,
    MistralParser,
    CallSyntax(
        before=(TOOL_CALLS, "["),
        call=('{"name": "', NAME, '", "arguments": ', ARGUMENTS, "}"),
        between=(", ",),
        after=("]",),
    ),
    id_prefix="",
    num_id_chars=9,
)
MISTRAL_ARGS = ToolFormat(
    "mistral-args",
    lambda source: TOOL_CALLS in source and ARGS in source,
    MistralParser,
    CallSyntax(call=(TOOL_CALLS, NAME, ARGS, ARGUMENTS), between=()),
    id_prefix="",
    num_id_chars=9,
)
THINK = ReasoningFormat(
    "think",
    lambda source: thinking.OPEN in source or thinking.CLOSE in source,
    thinking.OPEN,
    thinking.CLOSE,
)

TOOL_FORMATS: Mapping[str, ToolFormat] = {f.name: f for f in (HERMES, LLAMA3, MISTRAL, MISTRAL_ARGS)}
REASONING_FORMATS: Mapping[str, ReasoningFormat] = {f.name: f for f in (THINK,)}


@dataclass(frozen=True, slots=True)
class FormatChoice:
    """What an operator chose: names of formats, `auto` = what the chat template shows, `none` = nothing is parsed."""

    tool_parser: str = AUTO
    reasoning_parser: str = AUTO

    def tools(self, template: str) -> ToolFormat | None:
        """The format of tool calls with a model of that template; None = none is known."""
        return _chosen(self.tool_parser, TOOL_FORMATS, template)

    def reasoning(self, template: str) -> ReasoningFormat | None:
        """The format of reasoning with a model of that template."""
        return _chosen(self.reasoning_parser, REASONING_FORMATS, template)


def known_tool_parser(name: str) -> str:
    """`name`; ValueError where there is no such format of tool calls."""
    return _known(name, TOOL_FORMATS)


def known_reasoning_parser(name: str) -> str:
    """`name`; ValueError where there is no such format of reasoning."""
    return _known(name, REASONING_FORMATS)


def _known(name: str, formats: Mapping[str, object]) -> str:
    known = (AUTO, NONE, *formats)
    if name not in known:
        raise ValueError(f"must be one of {', '.join(known)}")
    return name


def _chosen(name: str, formats: Mapping[str, F], template: str) -> F | None:
    if name == AUTO:
        return next((found for found in formats.values() if found.fits(template)), None)
    return formats.get(name)
