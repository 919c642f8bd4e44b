"""Parser for calls behind a marker with JSON arguments: Hermes, Llama 3, Mistral, DeepSeek, Kimi, Granite and others."""

from collections.abc import Sequence
from dataclasses import dataclass

from gateway_svc.chat.buffered import begins_with_one
from gateway_svc.chat.tool_calls.call_parser_base import CallParser, CallRules
from gateway_svc.chat.tool_calls.json_calls import WHITESPACE
from gateway_svc.chat.tool_calls.pieces import NAME, Found, Piece, literals, match
from gateway_svc.text.output_parser import CONTENT


@dataclass(frozen=True, slots=True)
class CallMarkup:
    """Markup of calls: what a model writes around names and arguments.

    `openings`: markers of which one begins calls. `head`: pieces of a call up to its arguments; empty = calls
    are JSON objects only. `tail`: markers after a call's arguments, any of which may be missing. `between`:
    markers of which one begins a further call. `end`: marker after all calls. `at_start`: characters with
    which calls may begin at the start of the output, without a marker. `lead`: characters that are markup
    directly before an opening. `hidden`: markers that are markup in content. `call_id`: with placeholders for
    values of the head; empty = the model writes no id.
    """

    openings: Sequence[str]
    head: Sequence[Piece] = ()
    tail: Sequence[str] = ()
    between: Sequence[str] = ()
    end: str = ""
    at_start: str = ""
    lead: str = ""
    hidden: Sequence[str] = ()
    call_id: str = ""

    @property
    def closings(self) -> tuple[str, ...]:
        """Markers that may follow a call's arguments."""
        return (*self.tail, self.end) if self.end else tuple(self.tail)


class MarkedParser(CallParser):
    """Parser for calls in a `CallMarkup`.

    Also reads `{"name": ..., "arguments": {...}}`, and lists of calls in brackets, directly after an opening; and such
    objects one after the other where an `end` is expected.
    """

    def __init__(self, markup: CallMarkup, rules: CallRules) -> None:
        super().__init__(rules)
        self.openings, self.lead, self.hidden = tuple(markup.openings), markup.lead, tuple(markup.hidden)
        texts = (*markup.openings, *markup.closings, *markup.between, *markup.hidden)
        self.markers = frozenset(texts) | literals(markup.head)
        self.state = self._at_start if markup.at_start else self.in_content
        self._markup = markup
        self._is_list = False

    # --- implemented by formats with other arguments ----------------------------------------------------------------------

    def arguments_follow(self, place: int) -> bool | None:
        """True if arguments begin at `place`, after white space; None = not known yet."""
        is_there, begin = self.something_behind(place)
        return self.buffer[begin] == "{" if is_there else is_there

    def begin_arguments(self, found: Found) -> None:
        """Switch to the state that reads the arguments after a head."""
        self.read_arguments()

    # --- states ----------------------------------------------------------------------------------------------------------

    def _at_start(self) -> bool:
        is_there, place = self.something_behind()
        if is_there is None:
            return False
        self.state = self.at_calls if is_there and self.buffer[place] in self._markup.at_start else self.in_content
        return True

    def at_calls(self) -> bool:
        """State after an opening; see CallParser."""
        return self.read_held(self._begin)

    def _begin(self) -> bool:
        self._is_list = self.held.startswith("[")
        if self._is_list:
            self.hold_marker(self.num_before_held + 1)
        self.state = self._at_call
        return True

    def _at_call(self) -> bool:
        return self.read_held(self._read_call)

    def _read_call(self) -> bool:
        if self.held.startswith("{"):
            return self.read_object()
        found = match(self._markup.head, self.held) if self._markup.head else False
        if isinstance(found, Found):
            return self._at_arguments(found)
        return self.refuse() if found is False or self.is_over else False

    def _at_arguments(self, found: Found) -> bool:
        end = self.num_before_held + found.size
        follow = self.arguments_follow(end) if self.is_named(found.values[NAME]) else False
        if follow is None and not self.is_over:
            return False
        if not follow:
            return self.refuse()
        self.begin_call(found.values[NAME], end, _filled(self._markup.call_id, found))
        self.begin_arguments(found)
        return True

    def behind_call(self) -> bool:
        """State after a call's arguments; see CallParser."""
        is_there, place = self.something_behind()
        if not is_there:
            return is_there is False and self.end_calls()
        text, markup = self.buffer[place:], self._markup
        separators = (*markup.closings, *markup.between, *((",", "]") if self._is_list else ()))
        found = begins_with_one(text, separators, is_over=self.is_over)
        if found is None:
            return False
        if found in markup.closings or found == "]":
            self._is_list = self._is_list and found != "]"
            self.give(place + len(found), text="")
            return self.end_calls() if found == markup.end else True
        if not found and self.is_over and any(closing.startswith(text) for closing in markup.closings):
            self.give(len(self.buffer), text="")
        elif found or (markup.end and (markup.head or text[0] == "{")):
            self.hold_marker(place + len(found) if found else 0)
            self.state = self._at_call
            return True
        return self.end_calls()

    def end_calls(self) -> bool:
        """Switch to the state after all calls."""
        self.end_call()
        self.state = self._behind_calls
        return True

    def _behind_calls(self) -> bool:
        self.take_whitespace(WHITESPACE, CONTENT)
        self.state = self.in_content if self.buffer else self.state
        return bool(self.buffer)


def _filled(pattern: str, found: Found) -> str:
    for placeholder, value in found.values.items():
        pattern = pattern.replace(placeholder, value)
    return pattern
