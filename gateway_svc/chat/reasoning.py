"""Parser for reasoning between two markers at the start of an output; the rest goes to the next parser."""

from collections.abc import Sequence

from gateway_svc.chat.buffered import BufferedParser, begins_with_one, find_first
from gateway_svc.text.output_parser import CONTENT, REASONING, OutputParser, TextSpan

_NEWLINES = "\r\n"


class ReasoningParser(BufferedParser):
    """Reasoning parser.

    `begins`, `ends`: its markers, any of each. `is_open`: the prompt's end opens the reasoning. `answer`:
    parses what follows it; None = all content. Line breaks directly after the two markers and before the
    second are markup.
    """

    def __init__(
        self, answer: OutputParser | None, begins: Sequence[str], ends: Sequence[str], *, is_open: bool
    ) -> None:
        super().__init__()
        self._answer = answer
        self._begins, self._ends = begins, ends
        self._is_open = is_open
        self.markers = frozenset({*begins, *ends}) | (answer.markers if answer is not None else frozenset())
        self.current = REASONING if is_open else CONTENT

    def in_content(self) -> bool:
        """At the start of the output: reasoning begins here or nowhere."""
        is_there, place = self.something_behind()
        begins = begins_with_one(self.buffer[place:], self._begins, is_over=self.is_over) if is_there else is_there
        if begins is None:
            return False
        if begins:
            self.take(place + len(begins), REASONING, text="")
        self.current = REASONING if begins or self._is_open else CONTENT
        self.state = self._at_thought if self.current is REASONING else self._in_answer
        return True

    def _at_thought(self) -> bool:
        self.take_whitespace(_NEWLINES, REASONING)
        if self.buffer:
            self.state = self._in_thought
        return bool(self.buffer)

    def _in_thought(self) -> bool:
        begin, end = find_first(self.buffer, self._ends, _NEWLINES, is_over=self.is_over)
        self.take(begin, REASONING)
        if end is None:
            return False
        self.take(end - begin, REASONING, text="")
        self.current = CONTENT
        self.state = self._behind_thought
        return True

    def _behind_thought(self) -> bool:
        self.take_whitespace(_NEWLINES, CONTENT)
        self.state = self._in_answer if self.buffer else self.state
        return bool(self.buffer)

    def _in_answer(self) -> bool:
        if self._answer is None:
            self.take(len(self.buffer), CONTENT)
            return False
        text, self.buffer = self.buffer, ""
        self._spans += self._answer.feed(text)
        self.current = self._answer.current
        return False

    def end(self) -> list[TextSpan]:
        """Return the rest; see OutputParser."""
        spans = super().end()
        return spans if self._answer is None else spans + self._answer.end()
