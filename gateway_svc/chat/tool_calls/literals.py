"""Convert Python's and Gemma's literals to JSON, token by token as the model writes them."""

import json
import re
import string
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, TypeAlias

from gateway_svc.chat.buffered import begins_with_one, find_first, num_blanks

MAX_WORD_CHARS = 256
MAX_DEPTH = 128


@dataclass(frozen=True, slots=True)
class LiteralSyntax:
    """Syntax of literals.

    `quotes`: delimiters of strings. `has_escapes`: backslashes escape in strings. `equals`: between an
    argument's name and its value. `open` and `close`: around all arguments. `bare`: characters of words and numbers.
    `is_lax`: other words are strings, and keys need no quotes.
    """

    quotes: tuple[str, ...]
    has_escapes: bool
    equals: str
    open: str
    close: str
    bare: re.Pattern[str]
    is_lax: bool = False


PYTHON = LiteralSyntax(("'", '"'), True, "=", "(", ")", re.compile(r"[\w.+-]+"))
GEMMA = LiteralSyntax(('<|"|>',), False, ":", "{", "}", re.compile(r"[^\s,:{}\[\]<][^,:{}\[\]<\n]*"), is_lax=True)
FUNCTION_GEMMA = LiteralSyntax(("<escape>",), False, ":", "{", "}", GEMMA.bare, is_lax=True)


@dataclass(frozen=True, slots=True)
class LiteralStep:
    """The next `num_chars` characters, shown as `text`."""

    num_chars: int
    text: str


Next: TypeAlias = LiteralStep | Literal[False] | None

_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "a": "\a", "v": "\v", "0": "\0", "\n": ""}
_ESCAPES |= {char: char for char in "\\'\""}
_CODES = {"x": 2, "u": 4, "U": 8}
_WORDS = {"True": "true", "False": "false", "None": "null", "true": "true", "false": "false", "null": "null"}
_NUMBER = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?")
_OPEN = {"[": "]", "(": ")", "{": "}"}


class LiteralReader:
    """Reads the arguments of a call after its opening bracket, or with `is_value` one value.

    The texts of its steps together are JSON: for arguments, an object. `is_done`: the last character was read.
    `has_key`: the first argument's name was read.
    """

    def __init__(self, dialect: LiteralSyntax, *, is_value: bool = False) -> None:
        self._dialect = dialect
        self._closings: list[str] = [] if is_value else [dialect.close]
        self._state: Callable[[str], Next] = self._at_value if is_value else self._at_key
        self._prefix = "" if is_value else "{"
        self._quote = ""
        self._is_key = False
        self._is_call = not is_value
        self.is_done = False
        self.has_key = False

    def step(self, text: str) -> Next:
        """Read the next token at the start of `text`; None = more text decides, False = it is no literal."""
        blanks = 0 if self._quote else num_blanks(text)
        return LiteralStep(blanks, "") if blanks else self._state(text)

    # --- states ----------------------------------------------------------------------------------------------------------

    def _at_key(self, text: str) -> Next:
        if text.startswith(self._closings[-1]):
            return self._end_container()
        self._is_key = True
        if self._dialect.is_lax or self._in_object:
            quote = begins_with_one(text, self._dialect.quotes, is_over=False)
            if quote is None or quote:
                return None if quote is None else self._begin_string(quote)
        return self._word(text)

    def _behind_key(self, text: str) -> Next:
        if not text.startswith(":" if self._in_object else self._dialect.equals):
            return False
        self._state = self._at_value
        self.has_key = True
        return LiteralStep(1, ": ")

    def _at_value(self, text: str) -> Next:
        self._is_key = False
        if self._in_list and text.startswith(self._closings[-1]):
            return self._end_container()
        if text[0] in _OPEN:
            return self._begin_container(text[0])
        quote = begins_with_one(text, self._dialect.quotes, is_over=False)
        if quote is None:
            return None
        return self._begin_string(quote) if quote else self._word(text)

    def _behind_value(self, text: str) -> Next:
        if text.startswith(self._closings[-1]):
            return self._end_container()
        if not text.startswith(","):
            return False
        self._state = self._at_value if self._in_list else self._at_key
        self._prefix = ", "
        return LiteralStep(1, "")

    def _in_string(self, text: str) -> Next:
        if text.startswith(self._quote):
            size, self._quote = len(self._quote), ""
            self._end_token()
            return LiteralStep(size, '"')
        if self._dialect.has_escapes and text[0] == "\\":
            return _escape(text)
        stops = (self._quote, "\\") if self._dialect.has_escapes else (self._quote,)
        size, _ = find_first(text, stops, "", is_over=False)
        return LiteralStep(size, json.dumps(text[:size], ensure_ascii=False)[1:-1]) if size else None

    # --- parts -----------------------------------------------------------------------------------------------------------

    @property
    def _in_list(self) -> bool:
        return bool(self._closings) and self._closings[-1] != "}" and not self._in_arguments

    @property
    def _in_object(self) -> bool:
        return bool(self._closings) and self._closings[-1] == "}" and not self._in_arguments

    @property
    def _in_arguments(self) -> bool:
        return len(self._closings) == 1 and self._closings[0] == self._dialect.close and self._is_call

    def _begin_container(self, char: str) -> Next:
        if len(self._closings) == MAX_DEPTH:
            return False
        self._closings.append(_OPEN[char])
        self._state = self._at_key if char == "{" else self._at_value
        return self._shown(1, "{" if char == "{" else "[")

    def _end_container(self) -> LiteralStep:
        self._prefix = self._prefix.removeprefix(", ")
        is_list = self._in_list
        self._closings.pop()
        self._end_token(is_value=True)
        return self._shown(1, "]" if is_list else "}")

    def _begin_string(self, quote: str) -> LiteralStep:
        self._quote = quote
        self._state = self._in_string
        return self._shown(len(quote), '"')

    def _word(self, text: str) -> Next:
        found = self._dialect.bare.match(text)
        if found is None:
            return False
        if found.end() == len(text):
            return None if found.end() <= MAX_WORD_CHARS else False
        word = self._json_of(found[0].rstrip())
        if word is None:
            return False
        self._end_token()
        return self._shown(found.end(), word)

    def _json_of(self, word: str) -> str | None:
        if self._is_key:
            return json.dumps(word, ensure_ascii=False) if self._dialect.is_lax or self._in_arguments else None
        if word in _WORDS or _NUMBER.fullmatch(word):
            return _WORDS.get(word, word)
        return json.dumps(word, ensure_ascii=False) if self._dialect.is_lax else _number(word)

    def _end_token(self, *, is_value: bool = False) -> None:
        self._state = self._behind_key if self._is_key and not is_value else self._behind_value
        self.is_done = not self._closings and self._state == self._behind_value

    def _shown(self, num_chars: int, text: str) -> LiteralStep:
        prefix, self._prefix = self._prefix, ""
        return LiteralStep(num_chars, prefix + text)


def literal_json(text: str, dialect: LiteralSyntax) -> str | None:
    """JSON of a literal; None if the text is none."""
    reader, place, shown = LiteralReader(dialect, is_value=True), 0, list[str]()
    while place < len(text) and not reader.is_done:
        step = reader.step(text[place:])
        if not isinstance(step, LiteralStep):
            return None
        place += step.num_chars
        shown.append(step.text)
    return "".join(shown) if reader.is_done and place == len(text) else None


def _number(word: str) -> str | None:
    """JSON of a number as Python writes it; None if it is no finite number."""
    try:
        return str(int(word))
    except ValueError:
        pass
    try:
        return json.dumps(float(word), allow_nan=False)
    except ValueError:
        return None


def _escape(text: str) -> LiteralStep | None:
    """The character that a backslash and what follows it stand for; an unknown escape stands for itself."""
    if len(text) < 2:
        return None
    num_digits = _CODES.get(text[1], 0)
    digits = text[2 : 2 + num_digits]
    if num_digits and all(char in string.hexdigits for char in digits):
        if len(digits) < num_digits:
            return None
        code = int(digits, 16)
        if code < 0x110000 and not 0xD800 <= code < 0xE000:
            return LiteralStep(2 + num_digits, json.dumps(chr(code), ensure_ascii=False)[1:-1])
    return LiteralStep(2, json.dumps(_ESCAPES.get(text[1], text[:2]), ensure_ascii=False)[1:-1])
