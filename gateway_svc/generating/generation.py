"""One running generation: turns the scheduler's updates into public events, for the gRPC and the OpenAI API alike.

Events are the messages of quire.inference.v1: Started, then deltas of all choices (text, reasoning, tool
calls), PromptLogprobs if requested, one Finished per choice, and exactly one Usage, last.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from gateway_svc.engine.request_table import RequestTable
from gateway_svc.generating.cell_model import ServedModel
from gateway_svc.generating.choice_events import AnyDelta, ChoiceEvents
from gateway_svc.requests.engine_request import EngineRequest
from gateway_svc.requests.request_update import ChoiceUpdate, Update
from gateway_svc.requests.token_runs import public_prompt_logprobs
from gateway_svc.text.text_stream import TextStream
from protos.engine.v1 import engine_pb2
from protos.inference.v1 import inference_pb2
from svc_common import wire_arrays
from svc_common.clock import monotonic_ns
from svc_common.errors import Internal

Event = (
    inference_pb2.Started
    | inference_pb2.Delta
    | inference_pb2.ReasoningDelta
    | inference_pb2.ToolCallDelta
    | inference_pb2.Finished
    | inference_pb2.Usage
    | inference_pb2.PromptLogprobs
)

STARTED_GRACE_S = 0.1
STOPPED_ACCOUNT_S = 2.0


class Generation:
    """Asynchronous iterator over lists of events; each list merges everything new.

    Raises the QuireError that ended the request. The first list follows the scheduler's first message, or 0.1
    s without a refusal. `texts`: a fresh stream for each choice; `model`: the model or adapter that it was submitted to.
    `num_delivered`: output tokens of each choice that the reader already has; they produce no events.
    `on_first_output` is called once, at `first_output_ns`; `on_events`, if set, with each list. `worker_id`:
    the worker that ran the request, set together with `usage`.
    """

    def __init__(
        self,
        request: EngineRequest,
        requests: RequestTable,
        texts: Sequence[TextStream],
        model: ServedModel,
        *,
        num_delivered: Sequence[int] = (),
        on_first_output: Callable[[], None] = lambda: None,
    ) -> None:
        self._request = request
        self._requests = requests
        with_logprobs = request.submit.sampling.logprobs
        known = num_delivered or [0] * len(texts)
        self._choices = [
            ChoiceEvents(i, text, with_logprobs=with_logprobs, num_delivered=num_known)
            for i, (text, num_known) in enumerate(zip(texts, known, strict=True))
        ]
        self._num_open = len(self._choices)
        self.model = model
        self._has_begun = False
        self._on_first_output: Callable[[], None] | None = on_first_output
        self._done = False
        self.usage: inference_pb2.Usage | None = None
        self.worker_id = ""
        self.first_output_ns: int | None = None
        self.on_events: Callable[[list[Event]], None] | None = None

    @property
    def request_id(self) -> str:
        """Public request id, as set by the original submitter."""
        return self._request.request_id

    @property
    def started(self) -> inference_pb2.Started:
        """First event for any reader, the original one or a later one."""
        submit = self._request.submit
        return inference_pb2.Started(
            request_id=submit.request_id,
            effective_seed=submit.sampling.seed,
            model=self.model.name,
            max_tokens=submit.stop.max_tokens,
        )

    @property
    def num_choices(self) -> int:
        """Number of choices that it returns."""
        return len(self._choices)

    @property
    def num_prompt_tokens(self) -> int:
        """Number of prompt tokens."""
        return self._request.num_prompt_tokens

    @property
    def prompt_token_ids(self) -> list[int]:
        """Token ids of the prompt."""
        return wire_arrays.unpack(self._request.submit.token_ids, "token_ids").tolist()  # type: ignore[no-any-return]

    @property
    def finished(self) -> list[inference_pb2.Finished]:
        """Finish events of the complete choices, by number."""
        return [choice.finished for choice in self._choices if choice.finished is not None]

    def __aiter__(self) -> "Generation":
        return self

    async def __anext__(self) -> list[Event]:
        if self._done:
            raise StopAsyncIteration
        events: list[Event] = []
        while not events:
            update = await self._request.next(self._patience())
            events = [] if self._has_begun else [self.started]
            self._has_begun = True
            if update is not None:
                events += self._events_of(update)
            elif self._is_complete:
                events.append(self._end(engine_pb2.RequestAccount(prompt_tokens=self._request.num_prompt_tokens)))
        if self.on_events is not None:
            self.on_events(events)
        return events

    @property
    def _is_complete(self) -> bool:
        return self._num_open == 0

    def _patience(self) -> float | None:
        """Seconds to wait for the scheduler before an event is produced without it; None = no limit."""
        if not self._has_begun:
            return STARTED_GRACE_S
        return None if self._num_open else STOPPED_ACCOUNT_S

    def _events_of(self, update: Update) -> list[Event]:
        events: list[Event] = []
        if update.prompt_logprobs is not None:
            events.append(public_prompt_logprobs(update.prompt_logprobs, self._request.submit.token_ids))
        for number, choice in update.choices.items():
            events += self._choice_events(number, choice)
        if update.account is not None:
            events.append(self._end(update.account))
        return events

    def _choice_events(self, number: int, update: ChoiceUpdate) -> Sequence[Event]:
        choice = self._choices[number]
        was_open = choice.finished is None
        events = choice.take(update)
        self._num_open -= was_open and choice.finished is not None
        if events and self._on_first_output is not None:
            self._on_first_output()
            self._on_first_output = None
            self.first_output_ns = monotonic_ns()
        if events and choice.was_stopped_by_string:
            self._requests.stop(self._request, number, choice.num_output_tokens)
        return events

    def _end(self, account: engine_pb2.RequestAccount) -> inference_pb2.Usage:
        if not self._is_complete:
            raise Internal("the scheduler ended the request before all of its choices", reason="BAD_FINISH")
        self._done = True
        self.usage = inference_pb2.Usage(
            prompt_tokens=account.prompt_tokens or self._request.num_prompt_tokens,
            cached_prompt_tokens=account.cached_prompt_tokens,
            completion_tokens=sum(choice.num_output_tokens for choice in self._choices),
            timing=timing_of(account),
            reasoning_tokens=sum(choice.num_reasoning_tokens for choice in self._choices),
            accepted_draft_tokens=account.accepted_draft_tokens,
            rejected_draft_tokens=account.rejected_draft_tokens,
        )
        self.worker_id = account.worker_id
        return self.usage


async def collect(generation: Generation) -> inference_pb2.GenerateResponse:
    """Merge the events of a whole generation into the unary response."""
    started = generation.started
    response = inference_pb2.GenerateResponse(
        request_id=started.request_id, model=started.model, effective_seed=started.effective_seed
    )
    texts = [_ChoiceTexts() for _ in range(generation.num_choices)]
    for i in range(generation.num_choices):
        response.choices.add(index=i)
    async for events in generation:
        for event in events:
            if isinstance(event, AnyDelta):
                texts[event.choice].add(event)
            _merge(response, event)
    for choice, parts in zip(response.choices, texts, strict=True):
        parts.fill(choice)
    return response


@dataclass(slots=True)
class _ChoiceTexts:
    """Text pieces of one choice; joining them once keeps long outputs linear."""

    content: list[str] = field(default_factory=list)
    reasoning: list[str] = field(default_factory=list)
    calls: dict[int, inference_pb2.ToolCall] = field(default_factory=dict)
    arguments: dict[int, list[str]] = field(default_factory=dict)

    def add(self, delta: AnyDelta) -> None:
        """Append the text of one delta."""
        match delta:
            case inference_pb2.Delta():
                self.content.append(delta.text)
            case inference_pb2.ReasoningDelta():
                self.reasoning.append(delta.text)
            case inference_pb2.ToolCallDelta():
                self.calls.setdefault(delta.index, inference_pb2.ToolCall(id=delta.id, name=delta.name))
                self.arguments.setdefault(delta.index, []).append(delta.arguments)

    def fill(self, choice: inference_pb2.Choice) -> None:
        """Write the joined texts and tool calls into the response's choice."""
        choice.text, choice.reasoning = "".join(self.content), "".join(self.reasoning)
        for index, call in sorted(self.calls.items()):
            call.arguments = "".join(self.arguments[index])
            choice.tool_calls.append(call)


def _merge(response: inference_pb2.GenerateResponse, event: Event) -> None:
    match event:
        case inference_pb2.Delta() | inference_pb2.ReasoningDelta() | inference_pb2.ToolCallDelta():
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
    """Convert an account's times to milliseconds, and its counts."""
    return inference_pb2.Timing(
        queue_ms=account.queue_ns / 1e6,
        prefill_ms=account.prefill_ns / 1e6,
        decode_ms=account.decode_ns / 1e6,
        preempted_ms=account.preempted_ns / 1e6,
        num_preemptions=account.num_preemptions,
        num_migrations=account.num_migrations,
    )
