"""One choice of a running generation: detokenises its tokens and makes the public events. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from gateway_svc.requests.request_update import ChoiceUpdate
from gateway_svc.requests.token_runs import ChoiceTokens
from gateway_svc.text.detokenizer import TextSegment
from gateway_svc.text.output_parser import CONTENT, REASONING, AnswerPart, PartKind
from gateway_svc.text.text_stream import Piece, TextStream
from protos.common.v1 import common_pb2
from protos.engine.v1 import engine_pb2
from protos.inference.v1 import inference_pb2
from svc_common.errors import Cancelled, Internal

_NORMAL_ENDS = frozenset(
    {common_pb2.FINISH_REASON_STOP, common_pb2.FINISH_REASON_LENGTH, common_pb2.FINISH_REASON_DEADLINE}
)

AnyDelta = inference_pb2.Delta | inference_pb2.ReasoningDelta | inference_pb2.ToolCallDelta
ChoiceEvent = AnyDelta | inference_pb2.Finished


@dataclass(slots=True)
class _Stretch:
    """Adjacent segments of one part of the answer, merged into one event."""

    part: AnswerPart
    texts: list[str]
    token_ids: list[int]


class ChoiceEvents:
    """Turns one choice's tokens into events.

    `finished`: the finish event, once ended. `was_stopped_by_string`: a stop string ended it, which only the
    gateway detects. `num_output_tokens`: output tokens that count so far;
    `num_reasoning_tokens`: those of them that are reasoning. `num_delivered`: the first so many tokens
    produce no events again; an earlier delta ended exactly there.
    """

    def __init__(self, number: int, text: TextStream, *, with_logprobs: bool, num_delivered: int = 0) -> None:
        self._number = number
        self._text = text
        self._with_logprobs = with_logprobs
        self._num_delivered = num_delivered
        self._beside = ChoiceTokens()
        self._has_called = False
        self.finished: inference_pb2.Finished | None = None
        self.was_stopped_by_string = False
        self.num_output_tokens = 0
        self.num_reasoning_tokens = 0

    def take(self, update: ChoiceUpdate) -> list[ChoiceEvent]:
        """Events of the new output, with the end once. Raises the typed error of an abnormal end."""
        if self.finished is not None:
            return []
        end = update.finished
        if self._with_logprobs:
            self._beside.extend(update.run)
        stop_token = end is not None and end.HasField("stop_token_id") and bool(update.run.token_ids)
        piece = self._text.push(update.run.token_ids, ends_with_stop_token=stop_token)
        events: list[ChoiceEvent] = self._deltas(piece)
        if end is not None and piece.stopped_by is None:
            piece = self._text.finish()
            events += self._deltas(piece)
        self.num_output_tokens = piece.num_output_tokens
        if piece.stopped_by is not None:
            self.finished = self._stopped_by_string(piece.stopped_by)
            self.was_stopped_by_string = True
        elif end is not None:
            self.finished = self._ended(end)
        if self.finished is not None:
            events.append(self.finished)
        return events

    def _deltas(self, piece: Piece) -> list[ChoiceEvent]:
        """Events of a piece's undelivered segments."""
        new, begin = self._not_delivered(piece)
        deltas: list[ChoiceEvent] = []
        for stretch in _stretches(new):
            part, text, token_ids = stretch.part, "".join(stretch.texts), stretch.token_ids
            if not (token_ids or text or part.name):
                continue
            end = begin + len(token_ids)
            more = self._logprobs(begin, end) if self._with_logprobs else {}
            offset = piece.token_offset + begin
            deltas.append(_delta(part, text, token_ids, choice=self._number, token_offset=offset, **more))
            begin = end
        if self._with_logprobs:
            # Removed once per piece, since a resumed output may be long.
            self._beside = self._beside.without_first(begin)
        return deltas

    def _logprobs(self, begin: int, end: int) -> dict[str, Any]:
        """Logprob fields of these tokens of the current piece."""
        return {"logprobs": self._beside.logprobs[begin:end], "top_logprobs": self._beside.tops[begin:end]}

    def _not_delivered(self, piece: Piece) -> tuple[list[TextSegment], int]:
        """Return the undelivered segments and the number of tokens before them; updates the counts for all segments."""
        new: list[TextSegment] = []
        offset = begin = piece.token_offset
        for segment in piece.segments:
            num_tokens = len(segment.token_ids)
            offset += num_tokens
            if segment.part is not CONTENT:
                self._has_called |= segment.part.kind is PartKind.CALL
                self.num_reasoning_tokens += num_tokens if segment.part is REASONING else 0
            if offset > self._num_delivered:
                new.append(segment)
            else:
                begin = offset
        return new, begin - piece.token_offset

    def _stopped_by_string(self, stop: str) -> inference_pb2.Finished:
        return inference_pb2.Finished(choice=self._number, reason=common_pb2.FINISH_REASON_STOP, stop_string=stop)

    def _ended(self, end: engine_pb2.Finished) -> inference_pb2.Finished:
        """Convert an end to a finish event. Only normal ends are finish reasons; a failure or a cancel raises."""
        if end.reason == common_pb2.FINISH_REASON_CANCELLED:
            raise Cancelled("the request was cancelled", reason="CANCELLED")
        if end.reason not in _NORMAL_ENDS:
            raise Internal(f"the scheduler ended the request for reason {end.reason}", reason="BAD_FINISH")
        if end.reason == common_pb2.FINISH_REASON_STOP and self._has_called:
            return inference_pb2.Finished(choice=self._number, reason=common_pb2.FINISH_REASON_TOOL_CALLS)
        return inference_pb2.Finished(
            choice=self._number,
            reason=end.reason,
            stop_token_id=end.stop_token_id if end.HasField("stop_token_id") else None,
            score=end.score if end.HasField("score") else None,
        )


def _stretches(segments: Sequence[TextSegment]) -> list[_Stretch]:
    """Merge adjacent segments of one part."""
    stretches: list[_Stretch] = []
    for segment in segments:
        if stretches and segment.part.continues(stretches[-1].part):
            stretches[-1].texts.append(segment.text)
            stretches[-1].token_ids.extend(segment.token_ids)
        else:
            stretches.append(_Stretch(segment.part, [segment.text], list(segment.token_ids)))
    return stretches


def _delta(part: AnswerPart, text: str, token_ids: list[int], **fields: Any) -> AnyDelta:
    """Build a delta of `part`. `fields`: fields that all kinds of deltas share."""
    if part is CONTENT:
        return inference_pb2.Delta(text=text, token_ids=token_ids, **fields)
    if part is REASONING:
        return inference_pb2.ReasoningDelta(text=text, token_ids=token_ids, **fields)
    return inference_pb2.ToolCallDelta(
        index=part.call, id=part.call_id, name=part.name, arguments=text, token_ids=token_ids, **fields
    )
