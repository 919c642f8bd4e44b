"""Output tokens of one choice to text with stop strings: the last pure stage, used by the gateway and in process by `quire.LLM`."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from gateway_svc.text.bundle import TextModel
from gateway_svc.text.detokenizer import Segment
from gateway_svc.text.stop_strings import StopMatcher


@dataclass(frozen=True, slots=True)
class Piece:
    """What became final. `token_offset`: position of the first token in the choice's output.

    `stopped_by`: the stop string that ended the choice (once); then `text` ends before it, and tokens that only belong to it or
    lie behind it are not among `token_ids`. `num_output_tokens`: tokens that count, all pieces so far together.
    """

    text: str
    token_ids: list[int]
    token_offset: int
    stopped_by: str | None
    num_output_tokens: int


class TextStream:
    """Turns tokens into pieces; text that may begin a stop string is held back together with its tokens.

    Stop strings count only in text made by tokens after the first `min_tokens`, so at least that many tokens come out.
    """

    def __init__(self, text_model: TextModel, stop_strings: Sequence[str] = (), *, min_tokens: int = 0) -> None:
        self._detokenizer = text_model.detokenizer()
        self._matcher = StopMatcher(stop_strings) if stop_strings else None
        self._min_tokens = min_tokens
        self._held: deque[Segment] = deque()
        self._num_held_chars = 0
        self._num_segmented = 0
        self._num_released = 0
        self.stopped_by: str | None = None

    def push(self, token_ids: Sequence[int], *, ends_with_stop_token: bool = False) -> Piece:
        """Takes the next tokens; `ends_with_stop_token`: the last one ended the sequence and has no text."""
        last = len(token_ids) - 1
        for i, token_id in enumerate(token_ids):
            if self.stopped_by is not None:
                break
            segment = self._detokenizer.push(token_id, silent=ends_with_stop_token and i == last)
            if segment is not None:
                self._accept(segment)
        return self._release(everything=False)

    def finish(self) -> Piece:
        """The rest, when the sequence has ended."""
        segment = None if self.stopped_by is not None else self._detokenizer.flush()
        if segment is not None:
            self._accept(segment)
        return self._release(everything=True)

    def _accept(self, segment: Segment) -> None:
        eligible = self._num_segmented >= self._min_tokens
        self._num_segmented += len(segment.token_ids)
        match = self._matcher.feed(segment.text) if self._matcher is not None and eligible else None
        if match is None:
            self._held.append(segment)
            self._num_held_chars += len(segment.text)
            return
        self.stopped_by = match.stop
        cut = self._num_held_chars + match.end - len(match.stop)
        self._held.append(segment)
        self._cut(cut)

    def _cut(self, num_chars: int) -> None:
        """Keeps the first `num_chars` held characters and the tokens that are part of them."""
        kept: deque[Segment] = deque()
        for segment in self._held:
            if num_chars <= 0:
                break
            num_tokens = sum(start < num_chars for start in segment.starts)
            kept.append(Segment(segment.token_ids[:num_tokens], segment.starts[:num_tokens], segment.text[:num_chars]))
            num_chars -= len(segment.text)
        self._held = kept

    def _release(self, *, everything: bool) -> Piece:
        everything = everything or self.stopped_by is not None
        keep = 0 if everything or self._matcher is None else self._matcher.num_held
        texts: list[str] = []
        token_ids: list[int] = []
        while self._held and (everything or self._num_held_chars - len(self._held[0].text) >= keep):
            segment = self._held.popleft()
            self._num_held_chars -= len(segment.text)
            texts.append(segment.text)
            token_ids.extend(segment.token_ids)
        offset, self._num_released = self._num_released, self._num_released + len(token_ids)
        return Piece("".join(texts), token_ids, offset, self.stopped_by, self._num_released)
