"""Convert one choice's output tokens to text with stop strings.

Pure; used by the gateway and in process by `quire.LLM`.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from gateway_svc.text.detokenizer import TextSegment
from gateway_svc.text.output_parser import CONTENT, OutputParser
from gateway_svc.text.partition import Partition
from gateway_svc.text.stop_strings import StopMatcher
from gateway_svc.text.text_model import TextModel


@dataclass(slots=True)
class Piece:
    """Segments that became final, in order. `token_offset`: position of the first token in the choice's output.

    `stopped_by`: the stop string that ended the choice (reported once). The text then ends before it, and
    tokens that belong only to it or follow it are in no segment. `num_output_tokens`: tokens that count, over
    all pieces so far.
    """

    segments: list[TextSegment]
    token_offset: int
    stopped_by: str | None
    num_output_tokens: int

    @property
    def text(self) -> str:
        """Text of all segments."""
        return "".join(segment.text for segment in self.segments)

    @property
    def token_ids(self) -> list[int]:
        """Tokens of all segments."""
        return [token_id for segment in self.segments for token_id in segment.token_ids]


class TextStream:
    """Turns tokens into pieces; text that may begin a stop string is held back together with its tokens.

    Stop strings match only in text of tokens after the first `min_tokens`, so at least that many tokens come
    out. `parser`: separates reasoning and calls; None = all is content. With a parser, stop strings are
    searched only in content, each stretch between reasoning and calls separately, so that markup, reasoning
    and arguments are never cut. `include_stop`: the text ends with the stop string and includes the text of a
    stop token; `special_tokens`: they have text.
    """

    def __init__(
        self,
        text_model: TextModel,
        stop_strings: Sequence[str] = (),
        *,
        min_tokens: int = 0,
        parser: OutputParser | None = None,
        include_stop: bool = False,
        special_tokens: bool = False,
    ) -> None:
        self._detokenizer = text_model.detokenizer(special_tokens=special_tokens)
        self._include_stop = include_stop
        self._marker_of = {} if parser is None else text_model.special_ids(parser.markers)
        self._partition = None if parser is None else Partition(parser)
        self._stops = tuple(stop_strings)
        self._matcher = StopMatcher(stop_strings) if stop_strings else None
        self._min_tokens = min_tokens
        self._held: list[TextSegment] = []
        self._num_held_chars = 0
        self._num_segmented = 0
        self._num_released = 0
        self.stopped_by: str | None = None

    def push(self, token_ids: Sequence[int], *, ends_with_stop_token: bool = False) -> Piece:
        """Add the next tokens. `ends_with_stop_token`: the last one ended the sequence and has no text."""
        num_spoken = len(token_ids) - (ends_with_stop_token and not self._include_stop)
        for i, token_id in enumerate(token_ids):
            if self.stopped_by is not None:
                break
            self._take(token_id, silent=i >= num_spoken)
        return self._release(everything=False)

    def finish(self) -> Piece:
        """Return the rest at the end of the sequence."""
        if self.stopped_by is None and (segment := self._detokenizer.flush()) is not None:
            self._part(segment)
        if self.stopped_by is None and self._partition is not None:
            self._accept_all(self._partition.end())
        return self._release(everything=True)

    def _take(self, token_id: int, *, silent: bool) -> None:
        """Add one token. A marker that is a special token keeps its text, for the parser."""
        marker = self._marker_of.get(token_id) if self._marker_of and not silent else None
        known = self._detokenizer
        segment = known.push(token_id, silent=silent) if marker is None else known.flush()
        if segment is not None:
            self._part(segment)
        if marker is not None:
            self._part(TextSegment([token_id], [0], marker))

    def _part(self, segment: TextSegment) -> None:
        if self._partition is None:
            self._accept(segment)
        else:
            self._accept_all(self._partition.take(segment))

    def _accept_all(self, segments: list[TextSegment]) -> None:
        for segment in segments:
            if self.stopped_by is None:
                self._accept(segment)

    def _accept(self, segment: TextSegment) -> None:
        match = None if self._matcher is None else self._match(self._matcher, segment)
        self._num_segmented += len(segment.token_ids)
        self._held.append(segment)
        if match is None:
            self._num_held_chars += len(segment.text)
            return
        self.stopped_by, cut = match
        self._cut(cut)

    def _match(self, matcher: StopMatcher, segment: TextSegment) -> tuple[str, int] | None:
        """Return the stop string that this segment completes, and the number of held characters before it."""
        if segment.part is not CONTENT:
            if matcher.num_held:
                self._matcher = StopMatcher(self._stops)
            return None
        if self._num_segmented < self._min_tokens:
            return None
        match = matcher.feed(segment.text)
        if match is None:
            return None
        cut = match.end if self._include_stop else match.end - len(match.stop)
        return match.stop, self._num_held_chars + cut

    def _cut(self, num_chars: int) -> None:
        """Keep the first `num_chars` held characters with their tokens, and tokens without text before them."""
        kept: list[TextSegment] = []
        for segment in self._held:
            if not segment.text and num_chars >= 0:
                kept.append(segment)
                continue
            if num_chars <= 0:
                break
            num_tokens = sum(start < num_chars for start in segment.starts)
            token_ids, starts = segment.token_ids[:num_tokens], segment.starts[:num_tokens]
            kept.append(TextSegment(token_ids, starts, segment.text[:num_chars], segment.part))
            num_chars -= len(segment.text)
        self._held = kept

    def _release(self, *, everything: bool) -> Piece:
        if everything or self._matcher is None or self.stopped_by is not None or not self._matcher.num_held:
            segments, self._held, self._num_held_chars = self._held, [], 0
        else:
            segments = self._take_but(self._matcher.num_held)
        offset = self._num_released
        for segment in segments:
            self._num_released += len(segment.token_ids)
        return Piece(segments, offset, self.stopped_by, self._num_released)

    def _take_but(self, num_chars: int) -> list[TextSegment]:
        """Remove and return the held segments that do not contain any of the last `num_chars` characters."""
        num_segments = 0
        for segment in self._held:
            if self._num_held_chars - len(segment.text) < num_chars:
                break
            self._num_held_chars -= len(segment.text)
            num_segments += 1
        segments, self._held = self._held[:num_segments], self._held[num_segments:]
        return segments
