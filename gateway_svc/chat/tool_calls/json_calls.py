"""Read a tool call that is a JSON object, character by character as the model writes it.

Its form is `{"name": ..., "arguments": {...}}`.
"""

import json
from collections.abc import Callable
from enum import Enum

WHITESPACE = " \t\r\n"
ARGUMENT_KEYS = frozenset({"arguments", "parameters"})
NAME_KEYS = frozenset({"name", "tool_name"})
STRING_KEYS = NAME_KEYS | {"type", "id", "tool_call_id"}
MAX_STRING_CHARS = 256
# Characters that JSON allows outside strings; any other ends a call.
_STRUCTURE = frozenset('{}[]:,"+-.0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ')


class Status(Enum):
    """State of a reader."""

    READING = "reading"
    DONE = "done"
    BAD = "bad"


class ArgumentsReader:
    """Reads one JSON object up to its closing brace.

    Checks only brackets and strings; the rest is left to the client. `is_plausible`: it begins as JSON
    objects do.
    """

    def __init__(self) -> None:
        self._depth = 0
        self._in_string = False
        self._is_escaped = False
        self._first = ""

    @property
    def is_plausible(self) -> bool:
        """True if the first two significant characters fit an object."""
        return len(self._first) == 2

    def feed(self, char: str) -> Status:
        """Add the next character; one that returns BAD is not part of the object."""
        if self._in_string:
            self._feed_string(char)
            return Status.READING
        if char in WHITESPACE:
            return Status.READING
        if len(self._first) < 2 and not self._begins_well(char):
            return Status.BAD
        return self._feed_structure(char)

    def _begins_well(self, char: str) -> bool:
        good = char in ('"', "}") if self._first else char == "{"
        self._first += char
        return good

    def _feed_string(self, char: str) -> None:
        if self._is_escaped:
            self._is_escaped = False
        elif char == "\\":
            self._is_escaped = True
        elif char == '"':
            self._in_string = False

    def _feed_structure(self, char: str) -> Status:
        if char not in _STRUCTURE:
            return Status.BAD
        self._in_string = char == '"'
        self._depth += (char in "{[") - (char in "}]")
        return Status.READING if self._depth else Status.DONE


class CallReader:
    """Reads one call.

    Positions count from the object's opening brace; `size`: number of characters that are part of it. `name`:
    empty = not read yet. `begin`, `end`: range of its arguments; None = not reached yet. `settled`: number of
    characters up to the last complete value. A call with keys other than those of calls, or with a name not
    in `names` (None = any), is BAD.
    """

    def __init__(self, names: frozenset[str] | None) -> None:
        self._names = names
        self._arguments = ArgumentsReader()
        self._state: Callable[[str], bool] = self._at_start
        self._key = ""
        self._text = ""
        self._is_escaped = False
        self.size = self.settled = 0
        self.name = ""
        self.begin: int | None = None
        self.end: int | None = None
        self.status = Status.READING

    @property
    def is_call(self) -> bool:
        """True once a name and arguments that begin as an object have been read."""
        return bool(self.name) and self._arguments.is_plausible

    def feed(self, char: str) -> None:
        """Add the next character. Do not feed unless the status is READING."""
        if not self._state(char):
            self.status = Status.BAD
            return
        self.size += 1

    # --- states: each takes a character and returns whether it fits ------------------------------------------------------

    def _at_start(self, char: str) -> bool:
        self._state = self._before_key
        return char == "{"

    def _before_key(self, char: str) -> bool:
        if char == '"':
            self._begin_string(self._in_key)
        return char == '"' or char in WHITESPACE

    def _in_key(self, char: str) -> bool:
        if not self._string_ends(char):
            return len(self._text) <= MAX_STRING_CHARS
        self._key = self._text
        self._state = self._before_colon
        return self._key in ARGUMENT_KEYS or self._key in STRING_KEYS

    def _before_colon(self, char: str) -> bool:
        if char == ":":
            self._state = self._before_value
        return char == ":" or char in WHITESPACE

    def _before_value(self, char: str) -> bool:
        if char in WHITESPACE:
            return True
        if self._key in STRING_KEYS:
            self._begin_string(self._in_string)
            return char == '"'
        if self.begin is not None:
            return False
        self.begin = self.size
        self._state = self._in_arguments
        return self._in_arguments(char)

    def _in_string(self, char: str) -> bool:
        if not self._string_ends(char):
            return len(self._text) <= MAX_STRING_CHARS
        self._state = self._behind_value
        return self._key not in NAME_KEYS or self._take_name()

    def _take_name(self) -> bool:
        is_first, self.name = not self.name, self._text
        return is_first and bool(self.name) and (self._names is None or self.name in self._names)

    def _in_arguments(self, char: str) -> bool:
        status = self._arguments.feed(char)
        if status is Status.DONE:
            self.end = self.size + 1
            self._state = self._behind_value
        return status is not Status.BAD

    def _behind_value(self, char: str) -> bool:
        self.settled = self.size
        if char == ",":
            self._state = self._before_key
        elif char == "}":
            self.status = Status.DONE if self.is_call else Status.BAD
        return char in ",}" or char in WHITESPACE

    # --- strings -------------------------------------------------------------------------------------------------------

    def _begin_string(self, state: Callable[[str], bool]) -> None:
        self._text = ""
        self._state = state

    def _string_ends(self, char: str) -> bool:
        if char == '"' and not self._is_escaped:
            self._text = _unescaped(self._text)
            return True
        self._is_escaped = char == "\\" and not self._is_escaped
        self._text += char
        return False


def _unescaped(raw: str) -> str:
    """Decoded value of a JSON string's inside; empty if invalid."""
    try:
        return str(json.loads(f'"{raw}"'))
    except ValueError:
        return ""
