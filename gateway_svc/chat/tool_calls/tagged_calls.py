"""Parser for calls with parameters in tags: Qwen3-Coder, GLM, MiniMax, Seed-OSS, DeepSeek V3.2, Step3."""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass

from gateway_svc.chat.buffered import begins_with_one
from gateway_svc.chat.tool_calls.call_parser_base import MAX_HELD_CHARS, CallRules
from gateway_svc.chat.tool_calls.marked_calls import CallMarkup, MarkedParser
from gateway_svc.chat.tool_calls.parameter_types import STRING, json_value
from gateway_svc.chat.tool_calls.pieces import KEY, NAME, WORD, Found, Piece, literals, match

_IN_STRING = re.compile(r'(?:[^"\\]|\\.)*', re.DOTALL)
_JSON_STRING = re.compile(rf'"{_IN_STRING.pattern}"?', re.DOTALL)


@dataclass(frozen=True, slots=True, kw_only=True)
class TagMarkup(CallMarkup):
    """Markup of calls with parameters in tags.

    `key`: pieces before a parameter's value, the key's placeholder among them. If it has a placeholder
    `{word}`, that is `true` for strings and `false` for JSON. `close`: marker after a value. `is_padded`: one
    line break after the former and before the latter is markup.
    """

    key: Sequence[Piece]
    close: str
    is_padded: bool = False


class TaggedParser(MarkedParser):
    """Parser for calls in a `TagMarkup`; their arguments are shown as a JSON object.

    A string is shown as it comes, a value of another type once it is complete, or once it exceeds
    MAX_HELD_CHARS. Strings within an object or a list may contain the closing marker. Also reads a JSON
    object in place of the parameters, which forced calls have.
    """

    def __init__(self, markup: TagMarkup, rules: CallRules) -> None:
        super().__init__(markup, rules)
        self.markers |= literals(markup.key) | {markup.close}
        self._tags = markup
        self._name = ""
        self._types: Sequence[str] = ()
        self._is_first = True
        self._is_string = False

    def arguments_follow(self, place: int) -> bool | None:
        """True if a parameter, the call's end or a JSON object is at `place`; see MarkedParser."""
        is_there, begin = self.something_behind(place)
        if not is_there:
            return is_there
        starts = ("{", str(self._tags.key[0]), *self._tags.closings)
        begins = begins_with_one(self.buffer[begin:], starts, is_over=self.is_over)
        return None if begins is None else bool(begins)

    def begin_arguments(self, found: Found) -> None:
        """Switch to the state before the first parameter; see MarkedParser."""
        self._name = found.values[NAME]
        self._is_first = True
        self.state = self._at_parameter

    def _at_parameter(self) -> bool:
        is_there, place = self.something_behind()
        if not is_there:
            return is_there is False and self.end_call()
        text = self.buffer[place:]
        if self._is_first and text.startswith("{"):
            self.read_arguments()
            return True
        found = match(self._tags.key, text)
        if isinstance(found, Found):
            return self._begin_value(place, found)
        closing = begins_with_one(text, self._tags.closings, is_over=self.is_over)
        if (found is None or closing is None) and not self.is_over:
            return False
        if closing:
            self.give(place + len(closing), text="{}" if self._is_first else "}")
            if closing == self._tags.end:
                return self.end_calls()
        return self.end_call()

    def _begin_value(self, place: int, found: Found) -> bool:
        key = found.values[KEY]
        self._types = self.rules.types.get(self._name, {}).get(key, ())
        if WORD in found.values:
            self._types = (STRING,) if found.values[WORD] == "true" else ()
        self._is_string = list(self._types) == [STRING]
        separator = "{" if self._is_first else ", "
        quote = '"' if self._is_string else ""
        self._is_first = False
        self.give(place + found.size, text=f"{separator}{json.dumps(key, ensure_ascii=False)}: {quote}")
        self.state = self._at_value
        return True

    def _at_value(self) -> bool:
        self.give(int(self._tags.is_padded and self.buffer[0] == "\n"), text="")
        self.state = self._in_string if self._is_string else self._in_value
        return True

    def _in_string(self) -> bool:
        size, end = self._value_size(self.buffer.find(self._tags.close))
        self._give_escaped(size)
        if end:
            self.give(end - size, text='"')
            self.state = self._at_parameter
        return bool(end)

    def _in_value(self) -> bool:
        """State: in a value that is not known to be a string; held until it is complete."""
        size, end = self._value_size(self._closing_outside_strings())
        if size > MAX_HELD_CHARS:
            return self._begin_long_value()
        if not end:
            self.give(len(self.buffer) if self.is_over else 0)
            return False
        self.give(size, text=json_value(self.buffer[:size], self._types))
        self.give(end - size, text="" if size else json_value("", self._types))
        self.state = self._at_parameter
        return True

    def _begin_long_value(self) -> bool:
        """A value too long to be held: an object or list is shown as it comes, any other as a string."""
        is_json = self.buffer[:MAX_HELD_CHARS].lstrip().startswith(("{", "["))
        self.give(1, text=None if is_json else '"' + _escaped(self.buffer[0]))
        self.state = self._in_json_value if is_json else self._in_string
        return True

    def _in_json_value(self) -> bool:
        """State: in a long object or list, outside its strings."""
        size, end = self._value_size(self.buffer.find(self._tags.close))
        quote = self.buffer.find('"', 0, size)
        if quote >= 0:
            self.give(quote + 1)
            self.state = self._in_json_string
            return True
        self.give(size)
        if end:
            self.give(end - size, text="")
            self.state = self._at_parameter
        return bool(end)

    def _in_json_string(self) -> bool:
        """State: in a string of a long object or list, which may contain the closing marker."""
        found = _IN_STRING.match(self.buffer)
        size = found.end() if found else 0
        is_closed = self.buffer.startswith('"', size)
        self.give(len(self.buffer) if self.is_over and not is_closed else size + is_closed)
        if is_closed:
            self.state = self._in_json_value
        return is_closed

    def _value_size(self, size: int) -> tuple[int, int]:
        """Certain characters of the value, and those up to the end of its closing marker at `size`; -1, 0 = not there."""
        text, close = self.buffer, self._tags.close
        end = size + len(close) if size >= 0 else 0
        if size < 0:
            held = next((n for n in range(len(close) - 1, 0, -1) if text.endswith(close[:n])), 0)
            size = len(text) - (0 if self.is_over else held)
        if self._tags.is_padded and text[:size].endswith("\n") and (end or not self.is_over):
            size -= 1
        return size, end

    def _closing_outside_strings(self) -> int:
        """Where the closing marker begins, -1 = not there yet."""
        text, close = self.buffer, self._tags.close
        place = text.find(close)
        if place < 0 or not text.startswith(("{", "[")):
            return place
        outside = _JSON_STRING.sub(lambda found: " " * len(found[0]), text).find(close)
        return place if outside < 0 and self.is_over else outside

    def _give_escaped(self, num_chars: int) -> None:
        if num_chars:
            text = self.buffer[:num_chars]
            escaped = _escaped(text)
            self.give(num_chars, text=None if escaped == text else escaped)


def _escaped(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)[1:-1]
