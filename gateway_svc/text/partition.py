"""Characters back to tokens: the segments of one output, each with the part of the answer that it belongs to. Pure."""

from collections import deque
from dataclasses import dataclass, field

from gateway_svc.text.detokenizer import Segment
from gateway_svc.text.parts import OutputParser, Part, Span


@dataclass(slots=True)
class _Piece:
    """Characters of one part. `shown`: from where to where they are text and no markup."""

    part: Part
    num_chars: int = 0
    shown: list[tuple[int, int]] = field(default_factory=list)

    def add(self, num_chars: int, *, visible: bool) -> None:
        """The next characters."""
        if visible:
            self.shown.append((self.num_chars, self.num_chars + num_chars))
        self.num_chars += num_chars


@dataclass(slots=True)
class _Waiting:
    """A segment whose characters are not all certain. `part`: of its tokens, where it has no characters."""

    segment: Segment
    part: Part
    pieces: list[_Piece] = field(default_factory=list)
    num_certain: int = 0

    def add(self, num_chars: int, part: Part, *, visible: bool) -> None:
        """The next characters are of `part`."""
        if not self.pieces or not part.continues(self.pieces[-1].part):
            self.pieces.append(_Piece(part))
        self.pieces[-1].add(num_chars, visible=visible)
        self.num_certain += num_chars


class Partition:
    """Cuts the segments of one choice where parts of the answer begin and end; a segment waits until all of it is certain.

    Every token comes out once, in order, in the part of its first character, and nothing comes out without a token, so that between
    two tokens nothing is half told: a part that has text and no token of its own takes the next one, and until there is one what
    is before it waits, too. An output that ends there tells that text as the part that its last token is of.
    """

    def __init__(self, parser: OutputParser) -> None:
        self._parser = parser
        self._waiting: deque[_Waiting] = deque()
        self._next = 0
        self._untold: list[Segment] = []

    def take(self, segment: Segment) -> list[Segment]:
        """The segments that are certain now."""
        spans = self._parser.feed(segment.text) if segment.text else []
        self._waiting.append(_Waiting(segment, self._parser.current))
        return self._cut(spans)

    def end(self) -> list[Segment]:
        """The rest, when the output is over."""
        rest = self._cut(self._parser.end())
        untold, self._untold = self._untold, []
        return [*rest, _merged(untold)] if untold else rest

    def _cut(self, spans: list[Span]) -> list[Segment]:
        for span in spans:
            self._spread(span)
        certain: list[Segment] = []
        while self._waiting and self._waiting[0].num_certain == len(self._waiting[0].segment.text):
            certain += self._told(_pieces(self._waiting.popleft()))
            self._next -= 1
        self._next = max(self._next, 0)
        return certain

    def _spread(self, span: Span) -> None:
        """Gives a span's characters to the segments that they are of."""
        left, part = span.num_chars, span.part
        while left:
            waiting = self._waiting[self._next]
            num_chars = min(left, len(waiting.segment.text) - waiting.num_certain)
            if num_chars:
                waiting.add(num_chars, part, visible=span.visible)
                left, part = left - num_chars, part.rest
            if waiting.num_certain == len(waiting.segment.text):
                self._next += 1

    def _told(self, pieces: list[Segment]) -> list[Segment]:
        """What can be told when these follow: all up to the last token that something without one stands behind."""
        for piece in pieces:
            self._put(piece)
        _share(self._untold)
        num_told = len(self._untold)
        if not self._untold[-1].token_ids:
            num_told = max(i for i, segment in enumerate(self._untold) if segment.token_ids)
        told, self._untold = self._untold[:num_told], self._untold[num_told:]
        return told

    def _put(self, piece: Segment) -> None:
        late = self._untold[-1] if self._untold else None
        if late is not None and not late.token_ids and piece.part.continues(late.part):
            self._untold[-1] = _behind(late, piece)
        elif piece.token_ids or piece.text or piece.part.name:
            self._untold.append(piece)


def _share(pieces: list[Segment]) -> None:
    """Each piece without a token takes the first one behind it."""
    for i, piece in enumerate(pieces):
        giver = next((k for k in range(i + 1, len(pieces)) if pieces[k].token_ids), None)
        if piece.token_ids or giver is None:
            continue
        given = pieces[giver]
        pieces[i] = Segment(given.token_ids[:1], [0], piece.text, piece.part)
        pieces[giver] = Segment(given.token_ids[1:], [0, *given.starts[2:]], given.text, given.part)


def _behind(late: Segment, piece: Segment) -> Segment:
    """`piece` with the text of `late` before it, which counts as its first token's."""
    starts = [0 if i == 0 else start + len(late.text) for i, start in enumerate(piece.starts)]
    return Segment(piece.token_ids, starts, late.text + piece.text, late.part)


def _merged(pieces: list[Segment]) -> Segment:
    """All of it as the first one's part."""
    return Segment(pieces[0].token_ids, pieces[0].starts, "".join(piece.text for piece in pieces), pieces[0].part)


def _pieces(waiting: _Waiting) -> list[Segment]:
    """A segment cut where its parts end. A token is of the part of its first character."""
    segment = waiting.segment
    if not waiting.pieces:
        return [Segment(segment.token_ids, segment.starts, "", waiting.part)]
    cut: list[Segment] = []
    begin, token, num_tokens = 0, 0, len(segment.token_ids)
    for i, piece in enumerate(waiting.pieces):
        end, first = begin + piece.num_chars, token
        is_last = i == len(waiting.pieces) - 1
        while token < num_tokens and (is_last or segment.starts[token] < end):
            token += 1
        shown = piece.shown
        text = "".join(segment.text[begin + a : begin + b] for a, b in shown)
        starts = [_place(start - begin, shown) for start in segment.starts[first:token]]
        cut.append(Segment(segment.token_ids[first:token], starts, text, piece.part))
        begin = end
    return cut


def _place(char: int, shown: list[tuple[int, int]]) -> int:
    """Where a character lies in what is shown, or would."""
    return sum(min(max(char, a), b) - a for a, b in shown)
