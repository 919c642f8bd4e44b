"""Tokens to text, one token at a time. Pure: no tokenizer library, no I/O; the text model passes its functions in.

Text and tokens are held back together: a *segment* is the shortest run of tokens whose text is complete, so no code point is ever
split and text is a function of tokens alone, however they are cut into messages. Not here: stop strings.
"""

import codecs
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from gateway_svc.text.parts import CONTENT, Part

REPLACEMENT = "\ufffd"
_MAX_HELD_TOKENS = 32


@dataclass(slots=True)
class Segment:
    """Tokens and exactly their text; `starts[i]` is the index in `text` of the first character that token i is part of.

    `part`: of the answer, where the output of a chat was parsed.
    """

    token_ids: list[int]
    starts: list[int]
    text: str
    part: Part = CONTENT


class Detokenizer(Protocol):
    """Incremental decoding of one token stream from its start."""

    def push(self, token_id: int, *, silent: bool = False) -> Segment | None:
        """Takes the next token; the segment that it completes, or None. `silent`: the token has no text (a stop token)."""

    def flush(self) -> Segment | None:
        """What is still held back at the end, incomplete UTF-8 as U+FFFD."""


class ByteLevelDetokenizer:
    """For byte-level BPE: tokens are byte strings, text is their UTF-8. Invalid bytes become U+FFFD as in a full decode.

    `token_bytes(id)`: bytes of a token; empty for special and unknown ones.
    """

    def __init__(self, token_bytes: Callable[[int], bytes]) -> None:
        self._token_bytes = token_bytes
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._clear()

    def _clear(self) -> None:
        self._ids: list[int] = []
        self._starts: list[int] = []
        self._text = ""

    def push(self, token_id: int, *, silent: bool = False) -> Segment | None:
        """See Detokenizer."""
        data = b"" if silent else self._token_bytes(token_id)
        if not self._ids and data.isascii():
            return Segment([token_id], [0], data.decode())
        self._ids.append(token_id)
        self._starts.append(len(self._text))
        self._text += self._decoder.decode(data)
        return None if self._decoder.getstate()[0] else self._take()

    def flush(self) -> Segment | None:
        """See Detokenizer."""
        self._text += self._decoder.decode(b"", final=True)
        return self._take() if self._ids else None

    def _take(self) -> Segment:
        segment = Segment(self._ids, self._starts, self._text)
        self._clear()
        return segment


class WindowDetokenizer:
    """For every other decoder (Metaspace, byte fallback, WordPiece): decodes the new tokens behind the last segment.

    A segment ends where the text does not end in U+FFFD; after 32 held tokens it ends anyway, to stay linear.
    `decode(ids)`: full text of ids, special tokens left out.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str]) -> None:
        self._decode = decode
        self._context: list[int] = []
        self._ids: list[int] = []
        self._silent: set[int] = set()

    def push(self, token_id: int, *, silent: bool = False) -> Segment | None:
        """See Detokenizer."""
        if silent:
            self._silent.add(len(self._ids))
        self._ids.append(token_id)
        before, text = self._texts()
        complete = text.startswith(before) and not text.endswith(REPLACEMENT)
        if not complete and len(self._ids) < _MAX_HELD_TOKENS:
            return None
        return self._take(text[len(before) :])

    def flush(self) -> Segment | None:
        """See Detokenizer."""
        if not self._ids:
            return None
        before, text = self._texts()
        return self._take(text[len(before) :])

    def _texts(self) -> tuple[str, str]:
        return self._decode(self._context), self._decode([*self._context, *self._spoken()])

    def _spoken(self) -> list[int]:
        return [token for i, token in enumerate(self._ids) if i not in self._silent]

    def _take(self, text: str) -> Segment:
        segment = Segment(self._ids, [0] * len(self._ids), text)
        # Tokens without text are no context: the space before a word is only there behind another word.
        self._context = self._spoken() if text else [*self._context, *self._spoken()]
        self._ids, self._silent = [], set()
        return segment
