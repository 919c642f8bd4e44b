"""Conversion between the public API's messages and this package's values. Pure: makes no calls."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from protos.common.v1 import common_pb2
from protos.inference.v1 import inference_pb2 as pb
from quire.client.chat_messages import ChatOptions, Message, turns
from quire.client.outputs import (
    CompletionOutput,
    Delta,
    EmbeddingOutput,
    EmbeddingRequestOutput,
    Logprob,
    ModelCard,
    RequestOutput,
    ToolCall,
    ToolCallDelta,
    TopTokens,
    logprobs_at,
)
from quire.client.sampling_messages import fill
from quire.client.sampling_params import PoolingParams, SamplingParams
from quire.client.value_checks import is_listing, is_whole, valid_ids, valid_text
from svc_common.errors import InvalidArgument

Prompt = str | Sequence[int]
_NO_CHAT_OPTIONS = ChatOptions()
_PRIORITY_MAX = 2**31 - 1

_FINISH_REASONS = {
    common_pb2.FINISH_REASON_STOP: "stop",
    common_pb2.FINISH_REASON_LENGTH: "length",
    common_pb2.FINISH_REASON_CANCELLED: "abort",
    common_pb2.FINISH_REASON_TOOL_CALLS: "tool_calls",
    common_pb2.FINISH_REASON_DEADLINE: "deadline",
}
_ON_DEADLINE = {False: pb.ON_DEADLINE_UNSPECIFIED, True: pb.ON_DEADLINE_RETURN_PARTIAL}
_POOLINGS = {"mean": pb.POOLING_MEAN, "last": pb.POOLING_LAST}


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestOptions:
    """Options of a request besides prompt and sampling parameters.

    `model`: the name of the model or of an adapter; empty = the model. `priority`: higher = sooner.
    `resumable`: keep the request for a while if its reader or its gateway is lost.
    `partial_at_deadline`: at its deadline the request ends with the output so far (finish reason "deadline"), not with an error.
    """

    model: str = ""
    priority: int = 0
    cache_salt: str = ""
    no_cache_reuse: bool = False
    labels: Mapping[str, str] = field(default_factory=dict)
    resumable: bool = False
    partial_at_deadline: bool = False


def generate_request(prompt: Prompt, params: SamplingParams | None, options: RequestOptions) -> pb.GenerateRequest:
    """A completion request; `params` None leaves everything to the server's defaults."""
    request = pb.GenerateRequest(resumable=options.resumable, **_surroundings(options))
    fill(request, params)
    if isinstance(prompt, str):
        request.text = valid_text("prompt", prompt)
    elif not is_listing(prompt):
        raise InvalidArgument.field("prompt", f"must be a text or a list of token ids, not {type(prompt).__name__}")
    else:
        request.token_ids.SetInParent()
        request.token_ids.ids.extend(valid_ids("prompt", prompt))
    return request


def chat_request(
    messages: Sequence[Message] | str,
    params: SamplingParams | None,
    options: RequestOptions,
    chat: ChatOptions = _NO_CHAT_OPTIONS,
) -> pb.ChatRequest:
    """A chat request; a plain string is one user turn."""
    request = pb.ChatRequest(messages=turns(messages), resumable=options.resumable, **_surroundings(options))
    chat.fill(request)
    fill(request, params)
    return request


def resume_request(request_id: str, positions: Sequence[tuple[int, int]]) -> pb.ResumeRequest:
    """A request to resume a stream. `positions`: (choice, number of its tokens already received)."""
    places = [pb.ChoicePosition(choice=choice, token_offset=offset) for choice, offset in positions]
    return pb.ResumeRequest(request_id=request_id, positions=places)


def count_request(
    prompt: Prompt | Sequence[Message], options: RequestOptions, chat: ChatOptions | None
) -> pb.CountTokensRequest:
    """A request to count a prompt's tokens; a list of turns, or any prompt with `chat` options, is a conversation."""
    is_chat = chat is not None or (is_listing(prompt) and any(isinstance(turn, Mapping) for turn in prompt))
    if is_chat:
        request = chat_request(prompt, None, options, chat or _NO_CHAT_OPTIONS)  # type: ignore[arg-type]
        return pb.CountTokensRequest(chat=request)
    return pb.CountTokensRequest(generate=generate_request(prompt, None, options))  # type: ignore[arg-type]


def embed_request(prompts: Sequence[Prompt], params: PoolingParams | None, options: RequestOptions) -> pb.EmbedRequest:
    """A request for embeddings; `params` None leaves everything to the server's defaults."""
    if not is_listing(prompts):
        raise InvalidArgument.field("prompts", f"must be a list of prompts, not {type(prompts).__name__}")
    request = pb.EmbedRequest(inputs=[_embed_input(prompt) for prompt in prompts], **_surroundings(options))
    if params is not None:
        request.pooling, request.normalize = _POOLINGS[params.pooling], params.normalize
    return request


def _embed_input(prompt: Prompt) -> pb.EmbedInput:
    if isinstance(prompt, str):
        return pb.EmbedInput(text=valid_text("prompt", prompt))
    return pb.EmbedInput(token_ids=pb.TokenIds(ids=valid_ids("prompt", prompt)))


def _surroundings(options: RequestOptions) -> dict[str, Any]:
    return {
        "model": options.model,
        "scheduling": pb.Scheduling(
            priority=_valid_priority(options.priority), on_deadline=_ON_DEADLINE[options.partial_at_deadline]
        ),
        "cache": pb.CacheOptions(cache_salt=options.cache_salt, no_reuse=options.no_cache_reuse),
        "labels": dict(options.labels),
    }


def embedded(response: pb.EmbedResponse, prompts: Sequence[Prompt], request_id: str) -> list[EmbeddingRequestOutput]:
    """Embeddings paired with their prompts."""
    return [
        EmbeddingRequestOutput(
            request_id,
            EmbeddingOutput(list(embedding.values)),
            None if isinstance(prompt, str) else [int(i) for i in prompt],
            embedding.prompt_tokens,
        )
        for embedding, prompt in zip(response.embeddings, prompts, strict=True)
    ]


def _valid_priority(priority: int) -> int:
    if not is_whole(priority) or abs(priority) > _PRIORITY_MAX:
        raise InvalidArgument.field("priority", f"is {priority!r}; must be a whole number of 32 bits")
    return int(priority)


def model_card(model: pb.Model) -> ModelCard:
    """Convert a served model."""
    return ModelCard(
        model.name,
        model.max_model_len,
        model.vocab_size,
        model.block_size,
        model.chat,
        model.model_digest,
        model.base_model,
    )


class EventMerger:
    """Merges the events of one stream into a RequestOutput. `is_started`: the server has accepted the request.

    Not thread-safe: used by the stream's reader only.
    """

    def __init__(self, request_id: str, prompt: Prompt | None) -> None:
        text = prompt if isinstance(prompt, str) else None
        ids = None if prompt is None or isinstance(prompt, str) else list(prompt)
        self.is_started = False
        self.output = RequestOutput(request_id, text, ids, [CompletionOutput(0)])

    def add(self, event: pb.GenerateEvent) -> Delta | None:
        """Merge one event; return its delta if it has new output."""
        match event.WhichOneof("event"):
            case "started":
                self._started(event.started)
            case "delta":
                delta = event.delta
                return self._delta(delta, text=delta.text)
            case "reasoning_delta":
                return self._delta(event.reasoning_delta, reasoning=event.reasoning_delta.text)
            case "tool_call_delta":
                return self._tool_call(event.tool_call_delta)
            case "finished":
                finish(self._completion(event.finished.choice), event.finished)
            case "prompt_logprobs":
                self.output.prompt_logprobs = prompt_logprobs(event.prompt_logprobs)
            case "usage":
                _account(self.output, event.usage)
        return None

    def _started(self, started: pb.Started) -> None:
        self.is_started = True
        self.output.request_id = started.request_id
        self.output.seed = started.effective_seed
        self.output.model = started.model

    def positions(self) -> list[pb.ChoicePosition]:
        """Tokens received per choice: the position from which to resume."""
        return [
            pb.ChoicePosition(choice=output.index, token_offset=len(output.token_ids)) for output in self.output.outputs
        ]

    def _delta(
        self,
        delta: pb.Delta | pb.ReasoningDelta | pb.ToolCallDelta,
        *,
        text: str = "",
        reasoning: str = "",
        tool_call: ToolCallDelta | None = None,
    ) -> Delta:
        # Slices: they copy a repeated field in a fourth of the time of list(), which fetches elements until
        # there are no more.
        ids, choice = delta.token_ids[:], delta.choice
        logprobs, tops = delta.logprobs[:] or None, _tops(delta.top_logprobs[:])
        completion = self._completion(choice)
        completion.extend(text, ids, logprobs, tops)
        completion.reasoning += reasoning
        return Delta(text, ids, delta.token_offset, logprobs, choice, tops, reasoning, tool_call)

    def _tool_call(self, delta: pb.ToolCallDelta) -> Delta:
        calls = self._completion(delta.choice).tool_calls
        if delta.index >= len(calls):
            calls.append(ToolCall(delta.id, delta.name))
        calls[delta.index].arguments += delta.arguments
        piece = ToolCallDelta(delta.index, delta.arguments, delta.id, delta.name)
        return self._delta(delta, tool_call=piece)

    def _completion(self, choice: int) -> CompletionOutput:
        """The output with index `choice`; missing ones up to it are created."""
        outputs = self.output.outputs
        if choice >= len(outputs):
            outputs.extend(CompletionOutput(i) for i in range(len(outputs), choice + 1))
        return outputs[choice]


def merged(response: pb.GenerateResponse, prompt: Prompt | None) -> RequestOutput:
    """Convert a unary response."""
    output = EventMerger(response.request_id, prompt).output
    output.outputs = [_complete(choice) for choice in response.choices]
    output.model, output.seed = response.model, response.effective_seed
    if response.HasField("prompt_logprobs"):
        output.prompt_logprobs = prompt_logprobs(response.prompt_logprobs)
    _account(output, response.usage)
    return output


def _complete(choice: pb.Choice) -> CompletionOutput:
    completion = CompletionOutput(choice.index)
    completion.extend(choice.text, choice.token_ids, choice.logprobs[:] or None, _tops(choice.top_logprobs))
    completion.reasoning = choice.reasoning
    completion.tool_calls = [ToolCall(call.id, call.name, call.arguments) for call in choice.tool_calls]
    finish(completion, choice.finished)
    return completion


def _tops(given: Sequence[pb.TopLogprobs]) -> list[TopTokens] | None:
    return [list(zip(top.token_ids, top.logprobs, strict=True)) for top in given] or None


def prompt_logprobs(given: pb.PromptLogprobs) -> list[dict[int, Logprob] | None]:
    """One entry per prompt token, None for those before the first that has a log probability."""
    tops = _tops(given.top_logprobs) or [()] * len(given.token_ids)
    places = zip(given.token_ids, given.logprobs, tops, strict=True)
    return [None] * given.start_index + [logprobs_at(*place) for place in places]


def finish(completion: CompletionOutput, finished: pb.Finished) -> None:
    """Set finish reason, stop reason and score of one output."""
    completion.finish_reason = _FINISH_REASONS.get(finished.reason, "abort")
    completion.score = finished.score if finished.HasField("score") else None
    match finished.WhichOneof("stop_match"):
        case "stop_string":
            completion.stop_reason = finished.stop_string
        case "stop_token_id":
            completion.stop_reason = finished.stop_token_id


def _account(output: RequestOutput, usage: pb.Usage) -> None:
    output.finished = True
    output.num_prompt_tokens = usage.prompt_tokens
    output.num_cached_tokens = usage.cached_prompt_tokens
    output.num_reasoning_tokens = usage.reasoning_tokens
    output.num_preemptions = usage.timing.num_preemptions
