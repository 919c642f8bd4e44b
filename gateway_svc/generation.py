"""One running generation: the scheduler's updates become public events. Both doors read it; neither knows the scheduler.

Events are the messages of quire.inference.v1: Started, then Deltas of all choices, PromptLogprobs where asked, one Finished per
choice, exactly one Usage last.
"""

from collections.abc import Callable, Sequence

from gateway_svc.choice_events import ChoiceEvents
from gateway_svc.engine_request import ChoiceUpdate, EngineRequest, Update
from gateway_svc.request_table import RequestTable
from gateway_svc.text.text_stream import TextStream
from gateway_svc.token_runs import public_prompt_logprobs
from protos.engine.v1 import engine_pb2
from protos.inference.v1 import inference_pb2
from svc_common.errors import Internal

Event = (
    inference_pb2.Started
    | inference_pb2.Delta
    | inference_pb2.Finished
    | inference_pb2.Usage
    | inference_pb2.PromptLogprobs
)

STARTED_GRACE_S = 0.1
STOPPED_ACCOUNT_S = 2.0


class Generation:
    """Asynchronous iterator over lists of events; each list has everything new, merged. Raises the QuireError it failed by.

    The first list comes with the scheduler's first word or after 0.1 s without a refusal. `texts`: a fresh stream for each choice.
    `on_first_output` is called once.
    """

    def __init__(
        self,
        request: EngineRequest,
        requests: RequestTable,
        texts: Sequence[TextStream],
        started: inference_pb2.Started,
        *,
        on_first_output: Callable[[], None] = lambda: None,
    ) -> None:
        self._request = request
        self._requests = requests
        with_logprobs = request.submit.sampling.logprobs
        self._choices = [ChoiceEvents(i, text, with_logprobs=with_logprobs) for i, text in enumerate(texts)]
        self._started: inference_pb2.Started | None = started
        self._on_first_output: Callable[[], None] | None = on_first_output
        self._done = False
        self.started = started
        self.usage: inference_pb2.Usage | None = None

    @property
    def num_choices(self) -> int:
        """Choices that it returns."""
        return len(self._choices)

    @property
    def finished(self) -> list[inference_pb2.Finished]:
        """How those choices ended that are complete, by number."""
        return [choice.finished for choice in self._choices if choice.finished is not None]

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
            elif self._is_complete:
                events.append(self._end(engine_pb2.RequestAccount(prompt_tokens=self._request.num_prompt_tokens)))
        return events

    @property
    def _is_complete(self) -> bool:
        return all(choice.finished is not None for choice in self._choices)

    def _patience(self) -> float | None:
        """How long the next word of the scheduler may take before there is something to say without it."""
        if self._started is not None:
            return STARTED_GRACE_S
        return STOPPED_ACCOUNT_S if self._is_complete else None

    def _take_started(self) -> list[Event]:
        started, self._started = self._started, None
        return [] if started is None else [started]

    def _events_of(self, update: Update) -> list[Event]:
        events: list[Event] = []
        if update.prompt_logprobs is not None:
            events.append(public_prompt_logprobs(update.prompt_logprobs, self._request.submit.token_ids))
        for number, choice in update.choices.items():
            events += self._choice_events(number, choice)
        if update.account is not None:
            events.append(self._end(update.account))
        return events

    def _choice_events(self, number: int, update: ChoiceUpdate) -> list[Event]:
        choice = self._choices[number]
        events = choice.take(update)
        if events and self._on_first_output is not None:
            self._on_first_output()
            self._on_first_output = None
        if events and choice.was_stopped_by_string:
            self._requests.stop(self._request, number, choice.num_output_tokens)
        return [*events]

    def _end(self, account: engine_pb2.RequestAccount) -> inference_pb2.Usage:
        if not self._is_complete:
            raise Internal("the scheduler ended the request before all of its choices", reason="BAD_FINISH")
        self._done = True
        self.usage = inference_pb2.Usage(
            prompt_tokens=account.prompt_tokens or self._request.num_prompt_tokens,
            cached_prompt_tokens=account.cached_prompt_tokens,
            completion_tokens=sum(choice.num_output_tokens for choice in self._choices),
            timing=timing_of(account),
        )
        return self.usage


async def collect(generation: Generation) -> inference_pb2.GenerateResponse:
    """The events of a whole generation merged into the unary answer."""
    started = generation.started
    response = inference_pb2.GenerateResponse(
        request_id=started.request_id, model=started.model, effective_seed=started.effective_seed
    )
    texts: list[list[str]] = [[] for _ in range(generation.num_choices)]
    for i in range(generation.num_choices):
        response.choices.add(index=i)
    async for events in generation:
        for event in events:
            if isinstance(event, inference_pb2.Delta):
                texts[event.choice].append(event.text)
            _merge(response, event)
    for choice, parts in zip(response.choices, texts, strict=True):
        choice.text = "".join(parts)
    return response


def _merge(response: inference_pb2.GenerateResponse, event: Event) -> None:
    match event:
        case inference_pb2.Delta():
            choice = response.choices[event.choice]
            choice.token_ids.extend(event.token_ids)
            choice.logprobs.extend(event.logprobs)
            choice.top_logprobs.extend(event.top_logprobs)
        case inference_pb2.Finished():
            response.choices[event.choice].finished.CopyFrom(event)
        case inference_pb2.PromptLogprobs():
            response.prompt_logprobs.CopyFrom(event)
        case inference_pb2.Usage():
            response.usage.CopyFrom(event)


def timing_of(account: engine_pb2.RequestAccount) -> inference_pb2.Timing:
    """Milliseconds and counts of an account."""
    return inference_pb2.Timing(
        queue_ms=account.queue_ns / 1e6,
        prefill_ms=account.prefill_ns / 1e6,
        decode_ms=account.decode_ns / 1e6,
        preempted_ms=account.preempted_ns / 1e6,
        num_preemptions=account.num_preemptions,
        num_migrations=account.num_migrations,
    )
