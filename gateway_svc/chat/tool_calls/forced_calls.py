"""Grammars that force a model to call tools, or to either call or answer.

Calls follow the syntax of the model's format, and their arguments the tool's schema. A Lark grammar in
llguidance's dialect. Markers that are special tokens of the model are given by id, the others as text.
"""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gateway_svc.chat.tool_calls.format_types import CallSyntax, ReasoningFormat
from gateway_svc.chat.tool_calls.parameter_grammar import parameter_rules
from gateway_svc.chat.tool_calls.pieces import ARGUMENTS, NAME, NUMBER
from svc_common.grammars import with_bounded_whitespace

MAX_CALLS = 128

_JSON_TOKENS = re.compile(r'"[^"]*"|.', re.DOTALL)


@dataclass(frozen=True, slots=True)
class ForcedTool:
    """A callable tool; `parameters`: JSON schema of an object."""

    name: str
    parameters: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Reasoning:
    """Reasoning allowed before the calls. `is_open`: the prompt's end opens it."""

    format: ReasoningFormat
    is_open: bool


def forced_grammar(
    syntax: CallSyntax,
    tools: Sequence[ForcedTool],
    special_ids: Mapping[str, int],
    *,
    max_calls: int,
    reasoning: Reasoning | None = None,
    answer: Sequence[str] = (),
) -> str:
    """Build the grammar of at least one and at most `max_calls` calls, then the end.

    `special_ids`: ids of the markers that are special tokens. `answer`: rules of an alternative to calls, the
    rule `answer` first.
    """
    write = _Writer(special_ids)
    more = f" (between call){{0,{max_calls - 1}}}" if max_calls > 1 else ""
    said = f"({write.sequence(reasoning.format.before_answer if reasoning else ())} answer | calls)"
    lines = [
        f"start: {'thought ' if reasoning else ''}{said if answer else 'calls'}",
        f"calls: before call{more} after",
        *answer,
        f"before: {write.sequence(syntax.before)}",
        f"after: {write.sequence(syntax.after)}",
        f"between: {write.sequence(syntax.between)}",
        f"call: {' | '.join(f'call_{i}' for i in range(len(tools)))}",
        *(f"call_{i}: {write.call(syntax, tool, i)}" for i, tool in enumerate(tools)),
        *(rule for i, tool in enumerate(tools) for rule in _arguments(i, tool, syntax, write)),
        *(["NUMBER: /[0-9]{1,3}/"] if NUMBER in syntax.call else []),
        *(_thought(reasoning, write) if reasoning else ()),
    ]
    return "\n".join(lines) + "\n"


class _Writer:
    """Writes pieces of a syntax as grammar text."""

    def __init__(self, special_ids: Mapping[str, int]) -> None:
        self._special_ids = special_ids

    def piece(self, text: str) -> str:
        """Write a marker or text."""
        token_id = self._special_ids.get(text)
        return json.dumps(text, ensure_ascii=True) if token_id is None else f"<[{token_id}]>"

    def sequence(self, pieces: Iterable[str]) -> str:
        """Write several pieces in order."""
        return " ".join(map(self.piece, pieces)) or '""'

    def call(self, syntax: CallSyntax, tool: ForcedTool, number: int) -> str:
        """Write a call of `tool`."""
        parts = [tool.name if part == NAME else part for part in syntax.call]
        return self.joined(parts, {ARGUMENTS: f"arguments_{number}", NUMBER: "NUMBER"})

    def joined(self, parts: Sequence[str], rules: Mapping[str, str]) -> str:
        """Write parts in order, those in `rules` as the rules given for them.

        Adjacent texts become one literal, so that no name matches as the prefix of another.
        """
        pieces: list[str] = []
        text = ""
        for part in parts:
            if part in rules or part in self._special_ids:
                pieces += [self.literal(text)] if text else []
                pieces.append(rules.get(part) or self.piece(part))
                text = ""
            else:
                text += part
        return " ".join([*pieces, self.literal(text)] if text else pieces)

    def literal(self, text: str) -> str:
        """Write text that is no marker.

        Text that begins like JSON is split into JSON tokens: a longer literal would beat the answer's.
        """
        return self.sequence(_JSON_TOKENS.findall(text) if text.startswith("{") else [text])


def _arguments(number: int, tool: ForcedTool, syntax: CallSyntax, write: _Writer) -> list[str]:
    """Rules of a tool's arguments: parameters in tags if the format has them and they can express the schema, else JSON."""
    rules = syntax.parameter and parameter_rules(number, tool.parameters, syntax.parameter, write.joined)
    return rules or [f"arguments_{number}: %json {_schema(tool)}"]


def _schema(tool: ForcedTool) -> str:
    return json.dumps(with_bounded_whitespace({"type": "object", **tool.parameters}), ensure_ascii=False)


def _thought(reasoning: Reasoning, write: _Writer) -> list[str]:
    """Rules for reasoning up to the closing marker; optional if the prompt has not opened it."""
    begin, end, after = (
        write.sequence(texts)
        for texts in (reasoning.format.begins[0], reasoning.format.ends[0], reasoning.format.after)
    )
    is_token = end.startswith("<")
    head = "thinking gap" if reasoning.is_open else f"({begin} thinking gap)?"
    return [
        f"thought: {head}",
        f"thinking{'' if is_token else '[lazy]'}: /(.|\\n)*/ {end}",
        f"gap: /\\n{{0,2}}/ {after}",
    ]
