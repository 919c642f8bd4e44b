"""The grammar that makes a model call tools, in its own format's syntax, with arguments that fit the tool's schema, or answer.

A Lark grammar as llguidance reads it. Markers that are special tokens of the model are named by their ids; the others are text.
"""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gateway_svc.chat.tool_calls.formats import ARGUMENTS, NAME, CallSyntax, ReasoningFormat
from svc_common.grammars import with_bounded_whitespace

MAX_CALLS = 128

_JSON_TOKENS = re.compile(r'"[^"]*"|.', re.DOTALL)


@dataclass(frozen=True, slots=True)
class ForcedTool:
    """A tool that may be called; `parameters`: JSON schema of an object."""

    name: str
    parameters: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Reasoning:
    """What a model may think before it calls. `is_open`: the prompt's end has opened it."""

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
    """At least one call, at most `max_calls`, then the end. `special_ids`: ids of the markers that are special tokens.

    `answer`: rules of what there may be instead of calls, the one of that name first.
    """
    write = _Writer(special_ids)
    more = f" (between call){{0,{max_calls - 1}}}" if max_calls > 1 else ""
    lines = [
        f"start: {'thought ' if reasoning else ''}{'(answer | calls)' if answer else 'calls'}",
        f"calls: before call{more} after",
        *answer,
        f"before: {write.sequence(syntax.before)}",
        f"after: {write.sequence(syntax.after)}",
        f"between: {write.sequence(syntax.between)}",
        f"call: {' | '.join(f'call_{i}' for i in range(len(tools)))}",
        *(f"call_{i}: {write.call(syntax, tool, i)}" for i, tool in enumerate(tools)),
        *(f"arguments_{i}: %json {_schema(tool)}" for i, tool in enumerate(tools)),
        *(_thought(reasoning, write) if reasoning else ()),
    ]
    return "\n".join(lines) + "\n"


class _Writer:
    """Writes pieces of a syntax."""

    def __init__(self, special_ids: Mapping[str, int]) -> None:
        self._special_ids = special_ids

    def piece(self, text: str) -> str:
        """A marker or text."""
        token_id = self._special_ids.get(text)
        return json.dumps(text, ensure_ascii=True) if token_id is None else f"<[{token_id}]>"

    def sequence(self, pieces: Iterable[str]) -> str:
        """Several, in order."""
        return " ".join(map(self.piece, pieces)) or '""'

    def call(self, syntax: CallSyntax, tool: ForcedTool, number: int) -> str:
        """One call of `tool`; neighbouring texts are one literal, so that no name is taken for the beginning of another."""
        pieces: list[str] = []
        text = ""
        for part in syntax.call:
            if part == ARGUMENTS or part in self._special_ids:
                pieces += [self.literal(text)] if text else []
                pieces.append(f"arguments_{number}" if part == ARGUMENTS else self.piece(part))
                text = ""
            else:
                text += tool.name if part == NAME else part
        return " ".join([*pieces, self.literal(text)] if text else pieces)

    def literal(self, text: str) -> str:
        """Text that is no marker. What begins as JSON does is cut as JSON is: a longer literal would win over the answer's."""
        return self.sequence(_JSON_TOKENS.findall(text) if text.startswith("{") else [text])


def _schema(tool: ForcedTool) -> str:
    return json.dumps(with_bounded_whitespace({"type": "object", **tool.parameters}), ensure_ascii=False)


def _thought(reasoning: Reasoning, write: _Writer) -> list[str]:
    """To the closing marker; where the prompt has not opened it, it may be left out."""
    begin, end = (write.piece(marker) for marker in (reasoning.format.begin, reasoning.format.end))
    is_token = end.startswith("<")
    head = "thinking gap" if reasoning.is_open else f"({begin} thinking gap)?"
    return [f"thought: {head}", f"thinking{'' if is_token else '[lazy]'}: /(.|\\n)*/ {end}", "gap: /\\n{0,2}/"]
