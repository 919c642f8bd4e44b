"""Grammar rules and parser for chats with both tools and structured output.

The output is then either calls or an answer.
"""

import json
import re

from gateway_svc.chat.buffered import BufferedParser, begins_with
from gateway_svc.text.output_parser import CONTENT, OutputParser, TextSpan
from protos.common.v1 import common_pb2
from svc_common.grammars import CHOICE, JSON_SCHEMA, REGEX, with_bounded_whitespace

_ESCAPES = re.compile(r"\\(.)|/|\n", re.DOTALL)


def answer_rules(grammar: common_pb2.Grammar) -> list[str]:
    """Convert a grammar that compiles to rules of a Lark grammar; the start rule is `answer`."""
    if grammar.kind == JSON_SCHEMA:
        schema = with_bounded_whitespace(json.loads(grammar.text))
        return [f"answer: %json {json.dumps(schema, ensure_ascii=False)}"]
    if grammar.kind == REGEX:
        return ["answer: ANSWER", f"ANSWER: /{_ESCAPES.sub(_escaped, grammar.text)}/"]
    if grammar.kind == CHOICE:
        return ["answer: ANSWER", f"ANSWER: {' | '.join(map(json.dumps, json.loads(grammar.text)))}"]
    return ["answer: %lark {", grammar.text, "}"]


def _escaped(found: re.Match[str]) -> str:
    """Escape what Lark reads differently within its slashes."""
    char = found[1] or found[0]
    return {"/": "\\/", "\n": "\\n"}.get(char, found[0])


class AnswerParser(BufferedParser):
    """Parser for output that is content to its end unless it begins with `head`, as `calls` do.

    So text inside a JSON answer is never taken for a call.
    """

    def __init__(self, calls: OutputParser, head: str) -> None:
        super().__init__()
        self._calls = calls
        self._head = head
        self._is_calling = False
        self.markers = calls.markers

    def in_content(self) -> bool:
        """Decide by the start of the output."""
        begins = begins_with(self.buffer, self._head, is_over=self.is_over)
        if begins is None:
            return False
        self._is_calling = begins
        self.state = self._in_calls if begins else self._in_answer
        return True

    def _in_calls(self) -> bool:
        text, self.buffer = self.buffer, ""
        self._spans += self._calls.feed(text)
        self.current = self._calls.current
        return False

    def _in_answer(self) -> bool:
        self.take(len(self.buffer), CONTENT)
        return False

    def end(self) -> list[TextSpan]:
        """Return the rest; see OutputParser."""
        spans = super().end()
        return spans + self._calls.end() if self._is_calling else spans
