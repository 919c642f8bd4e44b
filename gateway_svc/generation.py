"""One running generation: the scheduler's updates become public events. Both doors read it; neither knows the scheduler.

Events are the messages of quire.inference.v1: Started, then Deltas, one Finished per choice, exactly one Usage last.
"""

from collections.abc import Callable

from gateway_svc.engine_request import CHOICE, EngineRequest, Update
from gateway_svc.request_table import RequestTable
from gateway_svc.text_stream import Piece, TextStream
from protos.common.v1 import common_pb2
from protos.engine.v1 import engine_pb2
from protos.inference.v1 import inference_pb2
from svc_common.errors import Cancelled, Internal

Event = inference_pb2.Started | inference_pb2.Delta | inference_pb2.Finished | inference_pb2.Usage

STARTED_GRACE_S = 0.1
STOPPED_ACCOUNT_S = 2.0
_NORMAL_ENDS = frozenset({common_pb2.FINISH_REASON_STOP, common_pb2.FINISH_REASON_LENGTH})


class Generation:
    """Asynchronous iterator over lists of events; each list has everything new, merged. Raises the QuireError it failed by.

    The first list comes with the scheduler's first word or after 0.1 s without a refusal. `on_first_output` is called once.
    """

    def __init__(
        self,
        request: EngineRequest,
        requests: RequestTable,
        text: TextStream,
        started: inference_pb2.Started,
        *,
        on_first_output: Callable[[], None] = lambda: None,
    ) -> None:
        self._request = request
        self._requests = requests
        self._text = text
        self._started: inference_pb2.Started | None = started
        self._logprobs: list[float] = []
        self._num_output_tokens = 0
        self._on_first_output: Callable[[], None] | None = on_first_output
        self._done = False
        self.started = started
        self.finished: inference_pb2.Finished | None = None
        self.usage: inference_pb2.Usage | None = None

    def __aiter__(self) -> "Generation":
        return self

    async def __anext__(self) -> list[Event]:
        if self._done:
            raise StopAsyncIteration
        events: list[Event] = []
        while not events:
            update = await self._request.next(self._patience())
            events = self._take_started()
            if update is not None:
                events += self._events_of(update)
            elif self.finished is not None:
                events.append(self._end(engine_pb2.RequestAccount(prompt_tokens=self._num_prompt_tokens)))
        return events

    def _patience(self) -> float | None:
        """How long the next word of the scheduler may take before there is something to say without it."""
        if self._started is not None:
            return STARTED_GRACE_S
        return STOPPED_ACCOUNT_S if self.finished is not None else None

    @property
    def _num_prompt_tokens(self) -> int:
        return len(self._request.submit.token_ids) // 4

    def _take_started(self) -> list[Event]:
        started, self._started = self._started, None
        return [] if started is None else [started]

    def _events_of(self, update: Update) -> list[Event]:
        events: list[Event] = []
        if self.finished is None:
            events = self._new_output(update)
        if update.finished is not None:
            events.append(self._end(update.finished.account))
        return events

    def _new_output(self, update: Update) -> list[Event]:
        end = update.finished
        self._logprobs += update.logprobs
        stop_token = end is not None and end.HasField("stop_token_id") and bool(update.token_ids)
        piece = self._text.push(update.token_ids, ends_with_stop_token=stop_token)
        events = self._delta(piece)
        if end is not None and piece.stopped_by is None:
            piece = self._text.finish()
            events += self._delta(piece)
        self._num_output_tokens = piece.num_output_tokens
        if piece.stopped_by is not None:
            self._requests.stop(self._request, piece.num_output_tokens)
            self.finished = _stopped_by_string(piece.stopped_by)
        elif end is not None:
            self.finished = _finished(end)
        return [*events, self.finished] if self.finished is not None else events

    def _delta(self, piece: Piece) -> list[Event]:
        if not piece.token_ids and not piece.text:
            return []
        if self._on_first_output is not None:
            self._on_first_output()
            self._on_first_output = None
        num_tokens = len(piece.token_ids)
        logprobs, self._logprobs = self._logprobs[:num_tokens], self._logprobs[num_tokens:]
        delta = inference_pb2.Delta(
            choice=CHOICE,
            text=piece.text,
            token_ids=piece.token_ids,
            token_offset=piece.token_offset,
            logprobs=logprobs if self._request.submit.sampling.logprobs else (),
        )
        return [delta]

    def _end(self, account: engine_pb2.RequestAccount) -> inference_pb2.Usage:
        self._done = True
        self.usage = inference_pb2.Usage(
            prompt_tokens=account.prompt_tokens or self._num_prompt_tokens,
            cached_prompt_tokens=account.cached_prompt_tokens,
            completion_tokens=self._num_output_tokens,
            timing=_timing(account),
        )
        return self.usage


async def collect(generation: Generation) -> inference_pb2.GenerateResponse:
    """The events of a whole generation merged into the unary answer."""
    choice = inference_pb2.Choice(index=CHOICE)
    texts: list[str] = []
    async for events in generation:
        for event in events:
            if isinstance(event, inference_pb2.Delta):
                texts.append(event.text)
                choice.token_ids.extend(event.token_ids)
                choice.logprobs.extend(event.logprobs)
    choice.text = "".join(texts)
    choice.finished.CopyFrom(generation.finished or inference_pb2.Finished())
    started = generation.started
    return inference_pb2.GenerateResponse(
        request_id=started.request_id,
        model=started.model,
        effective_seed=started.effective_seed,
        choices=[choice],
        usage=generation.usage,
    )


def _stopped_by_string(stop: str) -> inference_pb2.Finished:
    return inference_pb2.Finished(choice=CHOICE, reason=common_pb2.FINISH_REASON_STOP, stop_string=stop)


def _finished(end: engine_pb2.Finished) -> inference_pb2.Finished:
    """Only normal ends are finish reasons; a failure or a cancel must never look like one."""
    if end.reason == common_pb2.FINISH_REASON_CANCELLED:
        raise Cancelled("the request was cancelled", reason="CANCELLED")
    if end.reason not in _NORMAL_ENDS:
        raise Internal(f"the scheduler ended the request for reason {end.reason}", reason="BAD_FINISH")
    stop_token_id = end.stop_token_id if end.HasField("stop_token_id") else None
    return inference_pb2.Finished(choice=CHOICE, reason=end.reason, stop_token_id=stop_token_id)


def _timing(account: engine_pb2.RequestAccount) -> inference_pb2.Timing:
    return inference_pb2.Timing(
        queue_ms=account.queue_ns / 1e6,
        prefill_ms=account.prefill_ns / 1e6,
        decode_ms=account.decode_ns / 1e6,
        preempted_ms=account.preempted_ns / 1e6,
        num_preemptions=account.num_preemptions,
        num_migrations=account.num_migrations,
    )
