"""One choice of a running generation: its tokens become text, its text and end become public events. Pure."""

from gateway_svc.engine_request import ChoiceUpdate
from gateway_svc.text.text_stream import Piece, TextStream
from gateway_svc.token_runs import TokenRun
from protos.common.v1 import common_pb2
from protos.engine.v1 import engine_pb2
from protos.inference.v1 import inference_pb2
from svc_common.errors import Cancelled, Internal

_NORMAL_ENDS = frozenset({common_pb2.FINISH_REASON_STOP, common_pb2.FINISH_REASON_LENGTH})


class ChoiceEvents:
    """Owner of one choice's way to text. `finished`: how it ended. `num_output_tokens`: those that count so far."""

    def __init__(self, number: int, text: TextStream, *, with_logprobs: bool) -> None:
        self._number = number
        self._text = text
        self._with_logprobs = with_logprobs
        self._waiting = TokenRun()
        self.finished: inference_pb2.Finished | None = None
        self.num_output_tokens = 0

    def take(self, update: ChoiceUpdate) -> list[inference_pb2.Delta | inference_pb2.Finished]:
        """Events of what is new, once its end. Raises the typed error of an end that is no normal one."""
        if self.finished is not None:
            return []
        end = update.finished
        self._waiting.extend(update.run)
        stop_token = end is not None and end.HasField("stop_token_id") and bool(update.run.token_ids)
        piece = self._text.push(update.run.token_ids, ends_with_stop_token=stop_token)
        events = self._deltas(piece)
        if end is not None and piece.stopped_by is None:
            piece = self._text.finish()
            events += self._deltas(piece)
        self.num_output_tokens = piece.num_output_tokens
        if piece.stopped_by is not None:
            self.finished = self._stopped_by_string(piece.stopped_by)
        elif end is not None:
            self.finished = self._ended(end)
        return events if self.finished is None else [*events, self.finished]

    @property
    def was_stopped_by_string(self) -> bool:
        """Whether a stop string ended it, which only the gateway knows."""
        return self.finished is not None and self.finished.HasField("stop_string")

    def _deltas(self, piece: Piece) -> list[inference_pb2.Delta | inference_pb2.Finished]:
        if not piece.token_ids and not piece.text:
            return []
        num_tokens = len(piece.token_ids)
        waiting, self._waiting = self._waiting, self._waiting.without_first(num_tokens)
        delta = inference_pb2.Delta(
            choice=self._number,
            text=piece.text,
            token_ids=piece.token_ids,
            token_offset=piece.token_offset,
            logprobs=waiting.logprobs[:num_tokens] if self._with_logprobs else (),
            top_logprobs=waiting.tops[:num_tokens] if self._with_logprobs else (),
        )
        return [delta]

    def _stopped_by_string(self, stop: str) -> inference_pb2.Finished:
        return inference_pb2.Finished(choice=self._number, reason=common_pb2.FINISH_REASON_STOP, stop_string=stop)

    def _ended(self, end: engine_pb2.Finished) -> inference_pb2.Finished:
        """Only normal ends are finish reasons; a failure or a cancel must never look like one."""
        if end.reason == common_pb2.FINISH_REASON_CANCELLED:
            raise Cancelled("the request was cancelled", reason="CANCELLED")
        if end.reason not in _NORMAL_ENDS:
            raise Internal(f"the scheduler ended the request for reason {end.reason}", reason="BAD_FINISH")
        return inference_pb2.Finished(
            choice=self._number,
            reason=end.reason,
            stop_token_id=end.stop_token_id if end.HasField("stop_token_id") else None,
            score=end.score if end.HasField("score") else None,
        )
