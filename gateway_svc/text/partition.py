"""Map parsed characters back to tokens: segments of one output, each with its part of the answer. Pure."""

from collections import deque
from dataclasses import dataclass, field

from gateway_svc.text.detokenizer import TextSegment
from gateway_svc.text.output_parser import AnswerPart, OutputParser, TextSpan


@dataclass(slots=True)
class _Piece:
    """Characters of one part. `shown`: ranges of characters, each with the text in its place (None = its own)."""

    part: AnswerPart
    num_chars: int = 0
    shown: list[tuple[int, int, str | None]] = field(default_factory=list)

    def add(self, num_chars: int, text: str | None) -> None:
        """Append characters."""
        if text != "":
            self.shown.append((self.num_chars, self.num_chars + num_chars, text))
        self.num_chars += num_chars


@dataclass(slots=True)
class _Waiting:
    """A segment with some uncertain characters. `part`: of its tokens, if it has no characters."""

    segment: TextSegment
    part: AnswerPart
    pieces: list[_Piece] = field(default_factory=list)
    num_certain: int = 0

    def add(self, num_chars: int, part: AnswerPart, text: str | None) -> None:
        """Assign the next characters to `part`, shown as `text`."""
        if not self.pieces or not part.continues(self.pieces[-1].part):
            self.pieces.append(_Piece(part))
        self.pieces[-1].add(num_chars, text)
        self.num_certain += num_chars


class Partition:
    """Cuts the segments of one choice at the boundaries of the answer's parts.

    A segment waits until all of it is certain. Every token comes out once, in order, in the part of its first
    character. Nothing comes out without a token, so that every event boundary is a token boundary: a part
    that has text but no token of its own takes the next token, and what precedes it waits until there is one.
    If the output ends before that, the text is merged into the part of the last token.
    """

    def __init__(self, parser: OutputParser) -> None:
        self._parser = parser
        self._waiting: deque[_Waiting] = deque()
        self._next = 0
        self._untold: list[TextSegment] = []

    def take(self, segment: TextSegment) -> list[TextSegment]:
        """Add a segment; returns the segments that are certain now."""
        spans = self._parser.feed(segment.text) if segment.text else []
        self._waiting.append(_Waiting(segment, self._parser.current))
        return self._cut(spans)

    def end(self) -> list[TextSegment]:
        """Return the rest at the end of the output."""
        rest = self._cut(self._parser.end())
        untold, self._untold = self._untold, []
        return [*rest, _merged(untold)] if untold else rest

    def _cut(self, spans: list[TextSpan]) -> list[TextSegment]:
        for span in spans:
            self._spread(span)
        certain: list[TextSegment] = []
        while self._waiting and self._waiting[0].num_certain == len(self._waiting[0].segment.text):
            certain += self._told(_pieces(self._waiting.popleft()))
            self._next -= 1
        self._next = max(self._next, 0)
        return certain

    def _spread(self, span: TextSpan) -> None:
        """Assign a span's characters to their segments; text in their place comes with the last of them."""
        left, part = span.num_chars, span.part
        while left:
            waiting = self._waiting[self._next]
            num_chars = min(left, len(waiting.segment.text) - waiting.num_certain)
            if num_chars:
                waiting.add(num_chars, part, "" if span.text and num_chars < left else span.text)
                left, part = left - num_chars, part.rest
            if waiting.num_certain == len(waiting.segment.text):
                self._next += 1

    def _told(self, pieces: list[TextSegment]) -> list[TextSegment]:
        """Add pieces and return those that can be emitted.

        If text without a token follows the last token, these are all pieces before that token's.
        """
        for piece in pieces:
            self._put(piece)
        _share(self._untold)
        num_told = len(self._untold)
        if not self._untold[-1].token_ids:
            num_told = max(i for i, segment in enumerate(self._untold) if segment.token_ids)
        told, self._untold = self._untold[:num_told], self._untold[num_told:]
        return told

    def _put(self, piece: TextSegment) -> None:
        late = self._untold[-1] if self._untold else None
        if late is not None and not late.token_ids and piece.part.continues(late.part):
            self._untold[-1] = _behind(late, piece)
        elif piece.token_ids or piece.text or piece.part.name:
            self._untold.append(piece)


def _share(pieces: list[TextSegment]) -> None:
    """Give each piece without a token the first token after it."""
    for i, piece in enumerate(pieces):
        giver = next((k for k in range(i + 1, len(pieces)) if pieces[k].token_ids), None)
        if piece.token_ids or giver is None:
            continue
        given = pieces[giver]
        pieces[i] = TextSegment(given.token_ids[:1], [0], piece.text, piece.part)
        pieces[giver] = TextSegment(given.token_ids[1:], [0, *given.starts[2:]], given.text, given.part)


def _behind(late: TextSegment, piece: TextSegment) -> TextSegment:
    """Prepend the text of `late` to `piece`, as part of its first token."""
    starts = [0 if i == 0 else start + len(late.text) for i, start in enumerate(piece.starts)]
    return TextSegment(piece.token_ids, starts, late.text + piece.text, late.part)


def _merged(pieces: list[TextSegment]) -> TextSegment:
    """Merge all pieces into the first one's part."""
    return TextSegment(pieces[0].token_ids, pieces[0].starts, "".join(piece.text for piece in pieces), pieces[0].part)


def _pieces(waiting: _Waiting) -> list[TextSegment]:
    """Cut a segment at the boundaries of its parts. A token belongs to the part of its first character."""
    segment = waiting.segment
    if not waiting.pieces:
        return [TextSegment(segment.token_ids, segment.starts, "", waiting.part)]
    cut: list[TextSegment] = []
    begin, token, num_tokens = 0, 0, len(segment.token_ids)
    for i, piece in enumerate(waiting.pieces):
        end, first = begin + piece.num_chars, token
        is_last = i == len(waiting.pieces) - 1
        while token < num_tokens and (is_last or segment.starts[token] < end):
            token += 1
        shown = [(a, b, segment.text[begin + a : begin + b] if text is None else text) for a, b, text in piece.shown]
        text = "".join(text for _, _, text in shown)
        starts = [_place(start - begin, shown) for start in segment.starts[first:token]]
        cut.append(TextSegment(segment.token_ids[first:token], starts, text, piece.part))
        begin = end
    return cut


def _place(char: int, shown: list[tuple[int, int, str]]) -> int:
    """Position of a character in the shown text, or where it would be."""
    return sum(len(text) if char >= b else min(max(char - a, 0), len(text)) for a, b, text in shown)
