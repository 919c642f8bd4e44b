"""The public API's messages from and to this package's values. Pure: no calls are made here."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from protos.common.v1 import common_pb2
from protos.inference.v1 import inference_pb2 as pb
from quire.outputs import CompletionOutput, Delta, ModelCard, RequestOutput
from quire.sampling_params import SamplingParams, is_listing, is_whole
from svc_common.errors import InvalidArgument

Prompt = str | Sequence[int]
Message = Mapping[str, str]
_UINT32_MAX = 2**32 - 1
_PRIORITY_MAX = 2**31 - 1

_FINISH_REASONS = {
    common_pb2.FINISH_REASON_STOP: "stop",
    common_pb2.FINISH_REASON_LENGTH: "length",
    common_pb2.FINISH_REASON_CANCELLED: "abort",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestOptions:
    """What a call may say besides prompt and sampling. `model` empty = the only one; `priority` higher = sooner."""

    model: str = ""
    priority: int = 0
    cache_salt: str = ""
    no_cache_reuse: bool = False
    labels: Mapping[str, str] = field(default_factory=dict)


def generate_request(prompt: Prompt, params: SamplingParams | None, options: RequestOptions) -> pb.GenerateRequest:
    """A completion; `params` None leaves everything to the server's defaults."""
    request = pb.GenerateRequest(**_common(params, options))
    if isinstance(prompt, str):
        request.text = valid_text("prompt", prompt)
    elif not is_listing(prompt):
        raise InvalidArgument.field("prompt", f"must be a text or a list of token ids, not {type(prompt).__name__}")
    else:
        request.token_ids.SetInParent()
        request.token_ids.ids.extend(valid_ids("prompt", prompt))
    return request


def chat_request(
    messages: Sequence[Message] | str, params: SamplingParams | None, options: RequestOptions
) -> pb.ChatRequest:
    """An answer to a conversation; a plain string is one user turn."""
    turns: Sequence[Message] = [{"role": "user", "content": messages}] if isinstance(messages, str) else messages
    if not is_listing(turns):
        raise InvalidArgument.field("messages", f"must be a text or a list of turns, not {type(turns).__name__}")
    return pb.ChatRequest(messages=[_turn(i, turn) for i, turn in enumerate(turns)], **_common(params, options))


def _turn(i: int, turn: Message) -> pb.Message:
    if not isinstance(turn, Mapping):
        raise InvalidArgument.field(f"messages[{i}]", 'must be {"role": ..., "content": ...}')
    return pb.Message(
        **{name: valid_text(f"messages[{i}].{name}", turn.get(name)) for name in ("role", "content")}  # type: ignore[arg-type]
    )


def _common(params: SamplingParams | None, options: RequestOptions) -> dict[str, Any]:
    if not isinstance(params, SamplingParams | None):
        raise InvalidArgument.field("sampling_params", f"must be SamplingParams, not {type(params).__name__}")
    fields: dict[str, Any] = {
        "model": options.model,
        "scheduling": pb.Scheduling(priority=_valid_priority(options.priority)),
        "cache": pb.CacheOptions(cache_salt=options.cache_salt, no_reuse=options.no_cache_reuse),
        "labels": dict(options.labels),
    }
    if params is not None:
        fields |= _sampling_fields(params)
    return fields


def _sampling_fields(params: SamplingParams) -> dict[str, Any]:
    stop = pb.StopConditions(
        max_tokens=params.max_tokens,
        min_tokens=params.min_tokens,
        stop_strings=[valid_text("stop", s) for s in params.stop_strings],
        stop_token_ids=valid_ids("stop_token_ids", () if params.stop_token_ids is None else params.stop_token_ids),
        ignore_eos=params.ignore_eos,
    )
    top_k = None if params.top_k is None else max(params.top_k, 0)
    sampling = pb.SamplingParams(temperature=params.temperature, top_p=params.top_p, top_k=top_k, seed=params.seed)
    return {"sampling": sampling, "stop": stop, "response": pb.ResponseOptions(logprobs=params.wants_logprobs)}


def valid_request_id(request_id: str) -> str:
    """`request_id`, possibly empty, or InvalidArgument where it is none that can travel in metadata."""
    if not isinstance(request_id, str) or not request_id.isascii() or (request_id and not request_id.isprintable()):
        raise InvalidArgument.field("request_id", f"is {request_id!r}; must be a text of printable ASCII characters")
    return request_id


def _valid_priority(priority: int) -> int:
    if not is_whole(priority) or abs(priority) > _PRIORITY_MAX:
        raise InvalidArgument.field("priority", f"is {priority!r}; must be a whole number of 32 bits")
    return int(priority)


def valid_text(name: str, text: str) -> str:
    """`text`, or InvalidArgument where it is none, or holds a lone surrogate (it could not travel)."""
    if not isinstance(text, str):
        raise InvalidArgument.field(name, f"must be a text, not {type(text).__name__}")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InvalidArgument.field(name, f"is no valid Unicode text ({error.reason} at {error.start})") from None
    return text


def valid_ids(name: str, ids: Sequence[int]) -> list[int]:
    """`ids` as plain ints, or InvalidArgument where they are no list, or one is no whole number or fits no uint32."""
    if not is_listing(ids):
        raise InvalidArgument.field(name, f"must be a list of token ids, not {type(ids).__name__}")
    bad = [i for i in ids if not is_whole(i) or not 0 <= i <= _UINT32_MAX]
    if bad:
        raise InvalidArgument.field(name, f"has {bad[0]!r}, which is no token id")
    return [int(i) for i in ids]


def model_card(model: pb.Model) -> ModelCard:
    """A served model."""
    return ModelCard(
        model.name, model.max_model_len, model.vocab_size, model.block_size, model.chat, model.model_digest
    )


class EventMerger:
    """Merges the events of one stream into a RequestOutput; owned by the stream's reader."""

    def __init__(self, request_id: str, prompt: Prompt | None) -> None:
        text = prompt if isinstance(prompt, str) else None
        ids = None if prompt is None or isinstance(prompt, str) else list(prompt)
        self.output = RequestOutput(request_id, text, ids, [CompletionOutput(0)])

    def add(self, event: pb.GenerateEvent) -> Delta | None:
        """Takes one event in; returns it where it is new output."""
        match event.WhichOneof("event"):
            case "started":
                self._started(event.started)
            case "delta":
                return self._delta(event.delta)
            case "finished":
                finish(self.output.outputs[event.finished.choice], event.finished)
            case "usage":
                _account(self.output, event.usage)
        return None

    def _started(self, started: pb.Started) -> None:
        self.output.request_id = started.request_id
        self.output.seed = started.effective_seed
        self.output.model = started.model

    def _delta(self, delta: pb.Delta) -> Delta:
        ids, logprobs = list(delta.token_ids), list(delta.logprobs) or None
        self.output.outputs[delta.choice].extend(delta.text, ids, logprobs)
        return Delta(delta.text, ids, delta.token_offset, logprobs, delta.choice)


def merged(response: pb.GenerateResponse, prompt: Prompt | None) -> RequestOutput:
    """A unary answer."""
    output = EventMerger(response.request_id, prompt).output
    output.outputs = [_completion(choice) for choice in response.choices]
    output.model, output.seed = response.model, response.effective_seed
    _account(output, response.usage)
    return output


def _completion(choice: pb.Choice) -> CompletionOutput:
    completion = CompletionOutput(choice.index)
    completion.extend(choice.text, choice.token_ids, list(choice.logprobs) or None)
    finish(completion, choice.finished)
    return completion


def finish(completion: CompletionOutput, finished: pb.Finished) -> None:
    """Ends one output."""
    completion.finish_reason = _FINISH_REASONS.get(finished.reason, "abort")
    match finished.WhichOneof("stop_match"):
        case "stop_string":
            completion.stop_reason = finished.stop_string
        case "stop_token_id":
            completion.stop_reason = finished.stop_token_id


def _account(output: RequestOutput, usage: pb.Usage) -> None:
    output.finished = True
    output.num_prompt_tokens = usage.prompt_tokens
    output.num_cached_tokens = usage.cached_prompt_tokens
    output.num_preemptions = usage.timing.num_preemptions
