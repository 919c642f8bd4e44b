"""Requests of OpenEngine as Quire's. What Quire does not support is refused by name, as are fields of later revisions. Pure."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from google.protobuf.message import Message
from google.protobuf.unknown_fields import UnknownFieldSet

from protos.inference.v1 import inference_pb2
from protos.routers.v1 import openengine_pb2 as pb
from svc_common.errors import InvalidArgument

GRAMMAR_ENGINE = "llguidance"

_ANY_OBJECT = '{"type": "object"}'
_NO_TRANSFER = "is not supported: Quire has no transfer of KV caches between engines"
_USE_INSTEAD = "is not supported; send json_schema, regex, choice or json_object"


@dataclass(frozen=True, slots=True)
class TokenDetails:
    """What a request wants to know of tokens: `prompt`, of those of the prompt; `logprobs`, `prompt_logprobs`: their values.

    `stops`: the tokens of its stop conditions; `hidden_stops`: those that are left out where they end an output.
    """

    logprobs: bool
    prompt: bool
    prompt_logprobs: bool
    stops: frozenset[int]
    hidden_stops: frozenset[int]

    @classmethod
    def of(cls, request: pb.GenerateRequest) -> "TokenDetails":
        """Those of a request that was converted."""
        response, stopping = request.response, request.stopping
        conditions = (each for each in stopping.conditions if each.WhichOneof("condition") == "stop_token_id")
        stops = frozenset(each.stop_token_id for each in conditions)
        return cls(
            logprobs=response.return_output_logprobs,
            prompt=response.return_prompt_logprobs or response.HasField("prompt_candidates"),
            prompt_logprobs=response.return_prompt_logprobs,
            stops=stops,
            hidden_stops=frozenset() if stopping.include_stop_in_output else stops,
        )


def generate_request(request: pb.GenerateRequest) -> inference_pb2.GenerateRequest:
    """Raises InvalidArgument for what is not supported; values are checked as those of any request.

    The model is left to the caller, which knows the adapters.
    """
    for name, number in _unknown_fields(request, ""):
        raise InvalidArgument.field(name or "request", f"has a field {number}, which schema revision 1 does not know")
    if request.media:
        raise InvalidArgument.field("media", "is not supported: Quire serves text models")
    made = inference_pb2.GenerateRequest()
    if request.WhichOneof("input") == "prompt":
        made.text = request.prompt
    elif request.HasField("token_ids"):
        made.token_ids.ids.extend(request.token_ids.ids)
    _set_sampling(made.sampling, request.sampling)
    _set_stop(made.stop, request.stopping)
    _set_response(made.response, request.response)
    if request.HasField("kv"):
        _set_cache(made.cache, request.kv)
    if request.HasField("guided"):
        _set_guide(made, request.guided)
    return made


def _unknown_fields(message: Message, path: str) -> Iterator[tuple[str, int]]:
    """Path and number of each field, in the message and those in it, that this revision does not have."""
    for unknown in UnknownFieldSet(message):  # type: ignore[attr-defined]
        yield path, unknown.field_number
    for field, value in message.ListFields():
        if field.message_type is not None:
            inner = f"{path}.{field.name}" if path else field.name
            for each in [value] if isinstance(value, Message) else value:
                yield from _unknown_fields(each, inner)


def _copy_present(source: Message, target: Message, *names: str) -> None:
    for name in names:
        if source.HasField(name):
            setattr(target, name, getattr(source, name))


def _set_sampling(sampling: inference_pb2.SamplingParams, params: pb.SamplingParams) -> None:
    penalties = ("frequency_penalty", "presence_penalty", "repetition_penalty")
    _copy_present(params, sampling, "temperature", "top_p", "min_p", *penalties, "seed")
    if params.HasField("top_k"):
        if params.top_k < -1:
            raise InvalidArgument.field("sampling.top_k", f"is {params.top_k}; send 0 or -1 for all tokens")
        sampling.top_k = max(0, params.top_k)
    sampling.n = params.num_sequences if params.HasField("num_sequences") else 1


def _set_stop(stop: inference_pb2.StopConditions, stopping: pb.StoppingOptions) -> None:
    _copy_present(stopping, stop, "max_tokens", "min_tokens", "ignore_eos")
    if stopping.HasField("include_stop_in_output"):
        stop.include_in_output = stopping.include_stop_in_output
    for number, condition in enumerate(stopping.conditions):
        match condition.WhichOneof("condition"):
            case "stop_text":
                stop.stop_strings.append(condition.stop_text)
            case "stop_token_id":
                stop.stop_token_ids.append(condition.stop_token_id)
            case _:
                raise InvalidArgument.field(
                    f"stopping.conditions[{number}]", "is empty; set stop_text or stop_token_id"
                )


def _set_response(response: inference_pb2.ResponseOptions, asked: pb.ResponseOptions) -> None:
    if asked.prompt_logprob_start:
        raise InvalidArgument.field(
            "response.prompt_logprob_start",
            f"is {asked.prompt_logprob_start}; those of the whole prompt are given: send 0",
        )
    if asked.return_output_logprobs:
        response.logprobs = True
    if asked.HasField("output_candidates"):
        response.num_top_logprobs = _top_n(asked.output_candidates, "response.output_candidates")
    if asked.return_prompt_logprobs:
        response.num_prompt_logprobs = 0
    if asked.HasField("prompt_candidates"):
        response.num_prompt_logprobs = _top_n(asked.prompt_candidates, "response.prompt_candidates")


def _top_n(candidates: pb.CandidateTokenSelection, name: str) -> int:
    kind = candidates.WhichOneof("selection")
    if kind is None:
        raise InvalidArgument.field(name, "has no selection; set top_n")
    if kind != "top_n":
        raise InvalidArgument.field(f"{name}.{kind}", "is not supported; set top_n")
    return candidates.top_n


def _set_cache(cache: inference_pb2.CacheOptions, kv: pb.KvOptions) -> None:
    if kv.HasField("session"):
        raise InvalidArgument.field("kv.session", _NO_TRANSFER)
    cache.cache_salt, cache.no_reuse = kv.cache_salt, kv.bypass_prefix_cache


def _set_guide(made: inference_pb2.GenerateRequest, guided: pb.GuidedDecoding) -> None:
    if guided.backend not in ("", GRAMMAR_ENGINE):
        raise InvalidArgument.field("guided.backend", f"is {guided.backend[:40]!r}; the only one is {GRAMMAR_ENGINE!r}")
    kind: Any = guided.WhichOneof("guide")
    match kind:
        case "json_schema" | "regex":
            setattr(made, kind, getattr(guided, kind))
        case "choice":
            made.choice.choices.extend(guided.choice.choices)
            made.choice.SetInParent()
        case "json_object":
            made.json_schema = _ANY_OBJECT
        case None:
            raise InvalidArgument.field("guided", "has no guide; leave it out for any text")
        case _:
            raise InvalidArgument.field(f"guided.{kind}", _USE_INSTEAD)
