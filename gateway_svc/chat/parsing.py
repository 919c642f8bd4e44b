"""Parsing rules of one chat's output, complete enough for another gateway to continue it.

A parser that fails ends the parsing alone: the rest of the output is content.
"""

import json
import logging
import secrets
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Self

from gateway_svc.chat.calls_or_answer import AnswerParser
from gateway_svc.chat.tool_calls.call_parser_base import CallRules
from gateway_svc.chat.tool_calls.format_choice import NONE, REASONING_FORMATS
from gateway_svc.chat.tool_calls.parameter_types import ToolTypes
from gateway_svc.chat.tool_calls.tool_formats import TOOL_FORMATS
from gateway_svc.text.output_parser import CONTENT, AnswerPart, OutputParser, TextSpan
from svc_common.errors import InvalidArgument

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ChatParsing:
    """How to parse a chat's output.

    Formats of tool calls and reasoning, names of the callable tools, and the most calls allowed (None = any
    number). `reasoning_open`: the prompt's end opens the reasoning. `call_salt`: source of call ids; equal
    salts give equal ids. `or_answer`: the output begins with calls or has none. `tool_types`: types of the
    tools' parameters.
    """

    tool_format: str = NONE
    tool_names: tuple[str, ...] = ()
    max_calls: int | None = None
    reasoning_format: str = NONE
    reasoning_open: bool = False
    call_salt: str = field(default_factory=lambda: secrets.token_hex(16))
    or_answer: bool = False
    tool_types: ToolTypes = field(default_factory=dict)

    def parser(self, choice: int = 0) -> OutputParser | None:
        """Make a parser for that choice's output; None = all of it is content."""
        parser = self._call_parser(choice)
        if self.reasoning_format != NONE:
            parser = REASONING_FORMATS[self.reasoning_format].parser(parser, is_open=self.reasoning_open)
        return None if parser is None else GuardedParser(parser)

    def _call_parser(self, choice: int) -> OutputParser | None:
        if self.tool_format == NONE:
            return None
        tools = TOOL_FORMATS[self.tool_format]
        rules = CallRules(
            frozenset(self.tool_names),
            lambda number: tools.call_id(f"{self.call_salt}/{choice}/{number}"),
            self.max_calls,
            self.tool_types,
        )
        parser = tools.parser(rules)
        return AnswerParser(parser, tools.head) if self.or_answer else parser

    def to_json(self) -> str:
        """Serialise as text, for another gateway."""
        return json.dumps(asdict(self), separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Read what `to_json` wrote.

        Raises InvalidArgument for formats of another release that this one does not know.
        """
        try:
            fields: Mapping[str, Any] = json.loads(text)
            parsing = cls(**{**fields, "tool_names": tuple(fields["tool_names"])})
            parsing.parser()
        except (ValueError, TypeError, KeyError) as error:
            raise InvalidArgument.field(
                "frontend_state", "is no description of a chat's output that is known here"
            ) from error
        return parsing


class GuardedParser:
    """OutputParser around another one. If that raises or returns wrong spans, only the parsing ends."""

    def __init__(self, parser: OutputParser) -> None:
        self._parser = parser
        self._num_open = 0
        self._has_failed = False
        self.markers: frozenset[str] = parser.markers

    @property
    def current(self) -> AnswerPart:
        """Part of a token without text at this point."""
        return CONTENT if self._has_failed else self._parser.current

    def feed(self, text: str) -> list[TextSpan]:
        """Add text; see OutputParser."""
        self._num_open += len(text)
        return self._guarded(text)

    def end(self) -> list[TextSpan]:
        """Return the rest; see OutputParser."""
        return self._guarded(None)

    def _guarded(self, text: str | None) -> list[TextSpan]:
        if not self._has_failed:
            try:
                spans = self._parser.end() if text is None else self._parser.feed(text)
                num_chars = sum(span.num_chars for span in spans)
                if num_chars > self._num_open or (text is None and num_chars < self._num_open):
                    raise ValueError("a parser has to hand out each character once")
            except Exception as error:
                # Logs neither message nor traceback, since both may contain the output.
                log.error("the parser of an output failed: %s; the rest is content", type(error).__name__)
                self._has_failed = True
            else:
                self._num_open -= num_chars
                return spans
        num_open, self._num_open = self._num_open, 0
        return [TextSpan(num_open, CONTENT)] if num_open else []
