"""Incremental detokenisation, one token at a time.

Pure: no tokenizer library, no I/O; the text model passes its functions in. Text and tokens are held back
together: a *segment* is the shortest run of tokens with complete text. So no code point is ever split, and
the text depends on the tokens alone, not on how they are split into messages. Stop strings are in
`stop_strings`.
"""

import codecs
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from gateway_svc.text.output_parser import CONTENT, AnswerPart

REPLACEMENT = "\ufffd"
_MAX_HELD_TOKENS = 32


@dataclass(slots=True)
class TextSegment:
    """Tokens and exactly their text.

    `starts[i]` is the index in `text` of the first character that token i is part of. `part`: part of the
    answer, if chat output was parsed.
    """

    token_ids: list[int]
    starts: list[int]
    text: str
    part: AnswerPart = CONTENT


class Detokenizer(Protocol):
    """Incremental decoder of one token stream from its start."""

    def push(self, token_id: int, *, silent: bool = False) -> TextSegment | None:
        """Add the next token; returns the segment that it completes, or None.

        `silent`: the token has no text (a stop token).
        """

    def flush(self) -> TextSegment | None:
        """Return what is still held back at the end, with incomplete UTF-8 as U+FFFD."""


class ByteLevelDetokenizer:
    """Decoder for byte-level BPE: tokens are byte strings, text is their UTF-8.

    Invalid bytes become U+FFFD as in a full decode. `token_bytes(id)`: bytes of a token; empty for special
    and unknown ones.
    """

    def __init__(self, token_bytes: Callable[[int], bytes]) -> None:
        self._token_bytes = token_bytes
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._clear()

    def _clear(self) -> None:
        self._ids: list[int] = []
        self._starts: list[int] = []
        self._text = ""

    def push(self, token_id: int, *, silent: bool = False) -> TextSegment | None:
        """Add the next token; see Detokenizer."""
        data = b"" if silent else self._token_bytes(token_id)
        if not self._ids and data.isascii():
            return TextSegment([token_id], [0], data.decode())
        self._ids.append(token_id)
        self._starts.append(len(self._text))
        self._text += self._decoder.decode(data)
        return None if self._decoder.getstate()[0] else self._take()

    def flush(self) -> TextSegment | None:
        """Return the rest; see Detokenizer."""
        self._text += self._decoder.decode(b"", final=True)
        return self._take() if self._ids else None

    def _take(self) -> TextSegment:
        segment = TextSegment(self._ids, self._starts, self._text)
        self._clear()
        return segment


class WindowDetokenizer:
    """Decoder for all other tokenizers (Metaspace, byte fallback, WordPiece).

    Decodes new tokens in the context of the last segment. A segment ends where the text does not end in
    U+FFFD, or after 32 held tokens, to stay linear. `decode(ids)`: full text of ids, special tokens left out.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str]) -> None:
        self._decode = decode
        self._context: list[int] = []
        self._ids: list[int] = []
        self._silent: set[int] = set()

    def push(self, token_id: int, *, silent: bool = False) -> TextSegment | None:
        """Add the next token; see Detokenizer."""
        if silent:
            self._silent.add(len(self._ids))
        self._ids.append(token_id)
        before, text = self._texts()
        complete = text.startswith(before) and not text.endswith(REPLACEMENT)
        if not complete and len(self._ids) < _MAX_HELD_TOKENS:
            return None
        return self._take(text[len(before) :])

    def flush(self) -> TextSegment | None:
        """Return the rest; see Detokenizer."""
        if not self._ids:
            return None
        before, text = self._texts()
        return self._take(text[len(before) :])

    def _texts(self) -> tuple[str, str]:
        return self._decode(self._context), self._decode([*self._context, *self._spoken()])

    def _spoken(self) -> list[int]:
        return [token for i, token in enumerate(self._ids) if i not in self._silent]

    def _take(self, text: str) -> TextSegment:
        segment = TextSegment(self._ids, [0] * len(self._ids), text)
        # Tokens without text are no context: the space before a word appears only after another word.
        self._context = self._spoken() if text else [*self._context, *self._spoken()]
        self._ids, self._silent = [], set()
        return segment
