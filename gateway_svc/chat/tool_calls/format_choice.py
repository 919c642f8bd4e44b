"""Built-in formats of tool calls and reasoning, detected from the chat template or named in a gateway's settings."""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from gateway_svc.chat import reasoning
from gateway_svc.chat.tool_calls.call_parser_base import CallParser, CallRules
from gateway_svc.chat.tool_calls.call_parsers import (
    ARGS,
    HERMES_CLOSE,
    HERMES_OPEN,
    PYTHON_TAG,
    TOOL_CALLS,
    HermesParser,
    Llama3Parser,
    MistralParser,
)

F = TypeVar("F", "ToolFormat", "ReasoningFormat")

AUTO = "auto"
NONE = "none"


@dataclass(frozen=True, slots=True)
class CallSyntax:
    """Syntax of forced calls: texts and markers in order, with NAME and ARGUMENTS as placeholders.

    `before` and `after` all calls, and `between` two of them.
    """

    call: Sequence[str]
    between: Sequence[str]
    before: Sequence[str] = ()
    after: Sequence[str] = ()


NAME, ARGUMENTS = "{name}", "{arguments}"


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """Tool-call format of a model family. `fits`: tests whether a chat template's source is of that family."""

    name: str
    fits: Callable[[str], bool]
    parser: Callable[[CallRules], CallParser]
    syntax: CallSyntax
    id_prefix: str = "call_"
    num_id_chars: int = 24

    @property
    def head(self) -> str:
        """Start of forced calls.

        For a JSON object only the brace, since white space may follow it if a JSON answer is also allowed.
        """
        first = (*self.syntax.before, *self.syntax.call)[0]
        return first[0] if first.startswith("{") else first

    def call_id(self, seed: str) -> str:
        """Call id in the family's form, derived from `seed`."""
        return self.id_prefix + hashlib.sha256(seed.encode()).hexdigest()[: self.num_id_chars]


@dataclass(frozen=True, slots=True)
class ReasoningFormat:
    """Reasoning markers of a model family."""

    name: str
    fits: Callable[[str], bool]
    begin: str
    end: str

    def is_open(self, prompt: str) -> bool:
        """True if the prompt's end opens the reasoning."""
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
# Mistral's templates refuse ids of another length.
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
    lambda source: reasoning.OPEN in source or reasoning.CLOSE in source,
    reasoning.OPEN,
    reasoning.CLOSE,
)

TOOL_FORMATS: Mapping[str, ToolFormat] = {f.name: f for f in (HERMES, LLAMA3, MISTRAL, MISTRAL_ARGS)}
REASONING_FORMATS: Mapping[str, ReasoningFormat] = {f.name: f for f in (THINK,)}


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
