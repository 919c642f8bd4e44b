"""Parser for calls with arguments that are literals of Python (Llama 4, Olmo 3, LFM2, Gemma 3) or of Gemma 4."""

from gateway_svc.chat.buffered import num_blanks
from gateway_svc.chat.tool_calls.call_parser_base import CallRules
from gateway_svc.chat.tool_calls.literals import LiteralReader, LiteralStep, LiteralSyntax
from gateway_svc.chat.tool_calls.marked_calls import CallMarkup, MarkedParser
from gateway_svc.chat.tool_calls.pieces import MAX_KEY_CHARS, Found


class LiteralParser(MarkedParser):
    """Parser for calls in a `CallMarkup` with literals in brackets as arguments, which are shown as JSON.

    Also reads a JSON object in place of all arguments, which forced calls have.
    """

    def __init__(self, markup: CallMarkup, dialect: LiteralSyntax, rules: CallRules) -> None:
        super().__init__(markup, rules)
        self._dialect = dialect
        self._literals = LiteralReader(dialect)
        self.markers |= frozenset(dialect.quotes)

    def arguments_follow(self, place: int) -> bool | None:
        """True if an argument or the closing bracket is in brackets at `place`; see MarkedParser."""
        is_there, begin = self.something_behind(place)
        if not is_there or self.buffer[begin] != self._dialect.open:
            return is_there and False
        is_there, first = self.something_behind(begin + 1)
        if not is_there:
            return is_there
        return self._is_json(first) or self._is_literal(first)

    def _is_json(self, first: int) -> bool:
        """True if a JSON object is in the place of all arguments; `first`: the first character after the bracket."""
        return self.buffer[first] == ('"' if self._dialect.open == "{" else "{")

    def _is_literal(self, first: int) -> bool | None:
        reader, place = LiteralReader(self._dialect), first
        while place < len(self.buffer) and not (reader.is_done or reader.has_key):
            step = reader.step(self.buffer[place:])
            if place > first + MAX_KEY_CHARS:
                return False
            if not isinstance(step, LiteralStep):
                return step
            place += step.num_chars
        return True if reader.is_done or reader.has_key else None

    def begin_arguments(self, found: Found) -> None:
        """Switch to the state that reads the arguments after a head; see MarkedParser."""
        self._literals = LiteralReader(self._dialect)
        self.state = self._at_bracket

    def _at_bracket(self) -> bool:
        bracket = num_blanks(self.buffer)
        first = bracket + 1 + num_blanks(self.buffer, bracket + 1)
        is_json = self._is_json(first)
        self.give(bracket if is_json and self._dialect.open == "{" else first, text="")
        if is_json:
            self.read_arguments()
        else:
            self.state = self._in_literals
        return True

    def _in_literals(self) -> bool:
        step = self._literals.step(self.buffer)
        if isinstance(step, LiteralStep):
            self.give(step.num_chars, text=step.text)
            return self.end_call() if self._literals.is_done else True
        if step is False:
            return self.end_call()
        self.give(len(self.buffer) if self.is_over else 0)
        return False
