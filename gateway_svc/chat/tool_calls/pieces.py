"""Patterns made of literal texts and placeholders, matched against text that may still grow."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

from gateway_svc.chat.buffered import num_blanks

NAME, ARGUMENTS, KEY, NUMBER, WORD = "{name}", "{arguments}", "{key}", "{number}", "{word}"
"""Placeholders: a tool's name, its arguments, the key of a parameter, digits, and letters or digits."""

Piece: TypeAlias = "str | tuple[str, ...]"
"""A literal text or a placeholder; several of them in a tuple are optional together."""

MAX_KEY_CHARS = 256

_PATTERNS = {
    NAME: re.compile(r"[\w.-]{1,64}", re.ASCII),
    NUMBER: re.compile(r"[0-9]{1,9}"),
    WORD: re.compile(r"\w{1,64}", re.ASCII),
}


@dataclass(frozen=True, slots=True)
class Found:
    """A match of `size` characters, with the values of the placeholders."""

    size: int
    values: Mapping[str, str]


Match: TypeAlias = Found | Literal[False] | None


def match(pieces: Sequence[Piece], text: str) -> Match:
    """Match `pieces` at the start of `text`; None = more text decides, False = no match.

    White space may stand before each piece. A value ends before the first character that is not part of it.
    """
    place, values = 0, dict[str, str]()
    for i, piece in enumerate(pieces):
        found = _piece(piece, pieces[i + 1 :], text, place)
        if isinstance(piece, tuple) and found is False:
            continue
        if not isinstance(found, Found):
            return found
        place = found.size
        values |= found.values
    return Found(place, values)


def literals(pieces: Sequence[Piece]) -> frozenset[str]:
    """Literal texts of a pattern."""
    flat = {text for piece in pieces for text in ((piece,) if isinstance(piece, str) else piece)}
    return frozenset(flat - {NAME, ARGUMENTS, KEY, NUMBER, WORD})


def _piece(piece: Piece, rest: Sequence[Piece], text: str, place: int) -> Match:
    if isinstance(piece, tuple):
        found = match(piece, text[place:])
        return Found(place + found.size, found.values) if isinstance(found, Found) else found
    begin = place + num_blanks(text, place)
    if piece == KEY:
        return _key(str(rest[0]), text, begin)
    if piece in _PATTERNS:
        return _value(piece, text, begin)
    if text.startswith(piece, begin):
        return Found(begin + len(piece), {})
    return None if piece.startswith(text[begin:]) else False


def _value(piece: str, text: str, begin: int) -> Match:
    if begin == len(text):
        return None
    found = _PATTERNS[piece].match(text, begin)
    if found is None:
        return False
    return None if found.end() == len(text) else Found(found.end(), {piece: found[0]})


def _key(behind: str, text: str, begin: int) -> Match:
    """A parameter's key ends where the next literal text begins."""
    end = text.find(behind, begin, begin + MAX_KEY_CHARS + len(behind))
    if end < 0:
        return None if len(text) - begin < MAX_KEY_CHARS + len(behind) else False
    return Found(end, {KEY: text[begin:end].strip()})
