"""Validation and defaults of requests. Pure: no I/O; also used in process by `quire.LLM`.

defaults = SamplingDefaults.from_generation_config(text_model.generation_config)
check_parameters(request, limits)                                               # before tokenising, to fail early
resolved = resolve(request, prompt_token_ids, limits, defaults, text_model)     # after tokenising
submit = resolved.submit(request_id)                                            # the message to the scheduler
"""

import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from google.protobuf.message import DecodeError, Message

from gateway_svc.chat.parsing import ChatParsing
from gateway_svc.checks import sampling_checks
from gateway_svc.checks.first_token import check_first_token
from gateway_svc.checks.parameter_checks import (
    check_embed_inputs,
    check_ignored_end,
    check_messages,
    check_prompt,
    check_stop,
    check_surroundings,
)
from gateway_svc.checks.tokenized_constraints import Wording, bad_word_sequences, compiled_grammar
from gateway_svc.checks.tool_checks import check_tools
from gateway_svc.checks.violations import Violations
from protos.common.v1 import common_pb2
from protos.engine.v1 import engine_pb2
from protos.inference.v1 import inference_pb2
from svc_common import wire_arrays
from svc_common.errors import InvalidArgument, OutOfRange

AnyRequest = inference_pb2.GenerateRequest | inference_pb2.ChatRequest
M = TypeVar("M", bound=Message)
new_seed = partial(secrets.randbits, 64)
"""A seed for a request without one."""


@dataclass(frozen=True, slots=True)
class SamplingDefaults:
    """Values for absent sampling fields. `top_k` 0 = all."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0

    @classmethod
    def from_generation_config(cls, config: Mapping[str, Any]) -> "SamplingDefaults":
        """Take the checkpoint's values where it has them."""
        ours = cls()
        return cls(
            temperature=float(_value(config, "temperature", ours.temperature)),
            top_p=float(_value(config, "top_p", ours.top_p)),
            top_k=int(_value(config, "top_k", ours.top_k)),
            min_p=float(_value(config, "min_p", ours.min_p)),
            repetition_penalty=float(_value(config, "repetition_penalty", ours.repetition_penalty)),
        )


@dataclass(frozen=True, slots=True)
class ResolvedRequest:
    """A request with every default applied. `priority` has the public polarity: higher = sooner.

    `num_choices` are returned of `best_of` sequences, which are beams if `beam` is set. `task`: tokens, or a
    kind of embedding. `returns_partial`: at its deadline the request ends with the output so far.
    `resumable`: it outlives its reader for a while. `include_stop`, `special_tokens`: see TextStream.
    """

    prompt_token_ids: list[int]
    sampling: common_pb2.ResolvedSampling
    stop: common_pb2.StopRules
    stop_strings: tuple[str, ...]
    priority: int
    cache_salt: str
    no_cache_reuse: bool
    labels: dict[str, str]
    num_choices: int = 1
    best_of: int = 1
    beam: common_pb2.BeamRules | None = None
    task: common_pb2.Task = common_pb2.TASK_UNSPECIFIED
    parsing: ChatParsing | None = None
    returns_partial: bool = False
    resumable: bool = False
    include_stop: bool = False
    special_tokens: bool = False

    def submit(self, request_id: str, adapter: str = "", tenant: str = "") -> engine_pb2.Submit:
        """Build the message to the scheduler, without the fields that depend on the time of sending.

        `adapter`: empty = the base model.
        """
        return engine_pb2.Submit(
            request_id=request_id,
            tenant=tenant,
            token_ids=wire_arrays.pack(self.prompt_token_ids),
            sampling=self.sampling,
            stop=self.stop,
            num_choices=self.num_choices,
            best_of=self.best_of,
            beam=self.beam,
            priority=-self.priority,
            cache_salt=self.cache_salt,
            no_cache_reuse=self.no_cache_reuse,
            adapter=adapter,
            task=self.task,
            resumable=self.resumable,
        )


def parse(cls: type[M], raw: bytes) -> M:
    """Parse `raw`. Raises InvalidArgument for malformed protobuf and for text that is not UTF-8."""
    try:
        return cls.FromString(raw)
    except DecodeError as error:
        raise InvalidArgument.field(
            "request",
            f"is no valid {cls.DESCRIPTOR.full_name}: malformed protobuf, or a text field that is not UTF-8",
        ) from error


def check_parameters(request: AnyRequest, limits: common_pb2.ModelLimits) -> None:
    """Check everything but the prompt's tokens. Raises InvalidArgument with one violation per wrong field."""
    found = Violations()
    if isinstance(request, inference_pb2.ChatRequest):
        check_messages(request, found)
        check_tools(request, found)
    else:
        check_prompt(request, limits, found)
    sampling_checks.check_sampling(request.sampling, limits, found)
    if request.HasField("response"):
        sampling_checks.check_response(request.response, found)
    check_stop(request.stop, request.sampling, limits, found)
    if request.stop.ignore_eos:
        check_ignored_end(request, found)
    check_surroundings(request, found)
    found.raise_if_any()


def check_embed(request: inference_pb2.EmbedRequest, limits: common_pb2.ModelLimits) -> None:
    """Check an embedding request, as `check_parameters`."""
    found = Violations()
    check_embed_inputs(request, limits, found)
    check_surroundings(request, found)
    found.raise_if_any()


def check_token_ids(token_ids: Sequence[int], field: str, limits: common_pb2.ModelLimits) -> None:
    """Raise InvalidArgument naming the first id outside the vocabulary."""
    found = Violations()
    found.add_unknown_ids(token_ids, field, limits)
    found.raise_if_any()


def check_least_length(least_tokens: int, request: AnyRequest, limits: common_pb2.ModelLimits) -> None:
    """Apply `check_prompt_length` to a lower bound, unless the request truncates its prompt."""
    if not request.HasField("truncate_prompt_tokens"):
        check_prompt_length(least_tokens, limits)


def check_prompt_length(num_tokens: int, limits: common_pb2.ModelLimits) -> None:
    """Raise OutOfRange, with limit and length in its metadata, if no output token would fit after the prompt."""
    longest = limits.max_model_len - 1
    if num_tokens > longest:
        raise OutOfRange(
            f"the prompt has {num_tokens} tokens; {limits.model} takes at most {longest} (its context is "
            f"{limits.max_model_len}, prompt and output together); send a shorter one",
            reason="PROMPT_TOO_LONG",
            metadata={
                "limit": str(longest),
                "prompt_tokens": str(num_tokens),
                "max_model_len": str(limits.max_model_len),
            },
        )


def resolve(
    request: AnyRequest,
    prompt_token_ids: Sequence[int],
    limits: common_pb2.ModelLimits,
    defaults: SamplingDefaults,
    wording: Wording,
    *,
    forced: common_pb2.Grammar | None = None,
    draw_seed: Callable[[], int] = new_seed,
) -> ResolvedRequest:
    """Apply the defaults to a request that passed `check_parameters`, and compile its grammar.

    `forced`: the grammar of its calls. Raises InvalidArgument for a prompt of no tokens, for an unusable
    grammar or bad word and for constraints that allow no token, and OutOfRange for a prompt that is too long.
    `max_tokens` is reduced to what fits.
    """
    if not prompt_token_ids:
        field = "messages" if isinstance(request, inference_pb2.ChatRequest) else request.WhichOneof("prompt")
        raise InvalidArgument.field(field or "prompt", "has no tokens; send at least one")
    check_prompt_length(len(prompt_token_ids), limits)
    if request.response.HasField("num_prompt_logprobs"):
        sampling_checks.check_prompt_logprobs(request.response, len(prompt_token_ids))
    sampling = _resolved_sampling(request, limits, defaults)
    sampling.seed = request.sampling.seed if request.sampling.HasField("seed") else draw_seed()
    if request.sampling.bad_words:
        sampling.bad_words.extend(bad_word_sequences(request.sampling.bad_words, wording))
    if (grammar := forced or compiled_grammar(request, wording)) is not None:
        sampling.grammar.CopyFrom(grammar)
    stop = _resolved_stop(request.stop, limits.max_model_len - len(prompt_token_ids))
    check_first_token(sampling, stop, limits, wording)
    num_choices = sampling_checks.num_choices(request.sampling)
    return ResolvedRequest(
        prompt_token_ids=list(prompt_token_ids),
        sampling=sampling,
        stop=stop,
        stop_strings=tuple(request.stop.stop_strings),
        priority=request.scheduling.priority,
        cache_salt=request.cache.cache_salt,
        no_cache_reuse=request.cache.no_reuse,
        labels=dict(request.labels),
        num_choices=num_choices,
        best_of=request.sampling.best_of or num_choices,
        beam=_beam(request.sampling.beam) if request.sampling.HasField("beam") else None,
        returns_partial=request.scheduling.on_deadline == inference_pb2.ON_DEADLINE_RETURN_PARTIAL,
        resumable=request.resumable,
        include_stop=request.stop.include_in_output,
        special_tokens=request.response.special_tokens,
    )


def truncated(request: AnyRequest, token_ids: list[int], limits: common_pb2.ModelLimits) -> list[int]:
    """Return the prompt tokens to use: the last ones if the request asks for truncation.

    Raises InvalidArgument for an invalid limit.
    """
    if not request.HasField("truncate_prompt_tokens"):
        return token_ids
    most = request.truncate_prompt_tokens or limits.max_model_len - 1
    if most > limits.max_model_len:
        raise InvalidArgument.field(
            "truncate_prompt_tokens", f"is {most}; the model's context is {limits.max_model_len}, use at most that"
        )
    return token_ids[-most:]


def resolve_embed(
    request: inference_pb2.EmbedRequest, prompt_token_ids: Sequence[int], limits: common_pb2.ModelLimits
) -> ResolvedRequest:
    """Resolve one prompt of an embedding request that passed `check_embed`; nothing is sampled.

    Raises OutOfRange if it is too long.
    """
    check_prompt_length(len(prompt_token_ids), limits)
    last = request.pooling == inference_pb2.POOLING_LAST
    return ResolvedRequest(
        prompt_token_ids=list(prompt_token_ids),
        sampling=common_pb2.ResolvedSampling(top_p=1.0),
        stop=common_pb2.StopRules(max_tokens=1),
        stop_strings=(),
        priority=request.scheduling.priority,
        cache_salt=request.cache.cache_salt,
        no_cache_reuse=request.cache.no_reuse,
        labels=dict(request.labels),
        task=common_pb2.TASK_EMBED_LAST if last else common_pb2.TASK_EMBED_MEAN,
    )


# --- defaults --------------------------------------------------------------------------------------------------------


def _value(config: Mapping[str, Any], name: str, default: float) -> Any:
    value = config.get(name)
    return default if value is None else value


def _resolved_sampling(
    request: AnyRequest, limits: common_pb2.ModelLimits, defaults: SamplingDefaults
) -> common_pb2.ResolvedSampling:
    asked, response = request.sampling, request.response
    given = {field.name: value for field, value in asked.ListFields()}
    resolved = common_pb2.ResolvedSampling(
        temperature=given.get("temperature", defaults.temperature),
        top_p=given.get("top_p", defaults.top_p),
        top_k=min(given.get("top_k", defaults.top_k), limits.vocab_size),
        min_p=given.get("min_p", defaults.min_p),
        repetition_penalty=given.get("repetition_penalty", defaults.repetition_penalty),
        presence_penalty=asked.presence_penalty,
        frequency_penalty=asked.frequency_penalty,
        logprobs=response.logprobs or response.num_top_logprobs > 0,
        num_top_logprobs=min(response.num_top_logprobs, limits.vocab_size),
    )
    if "beam" in given:  # A beam search uses the distribution unchanged.
        resolved.temperature, resolved.top_p, resolved.top_k, resolved.min_p = 0.0, 1.0, 0, 0.0
    if response.HasField("num_prompt_logprobs"):
        resolved.num_prompt_logprobs = min(response.num_prompt_logprobs, limits.vocab_size)
    if asked.logit_bias:
        token_ids, biases = zip(*sorted(asked.logit_bias.items()), strict=True)
        resolved.logit_bias_ids = wire_arrays.pack(token_ids)
        resolved.logit_biases = wire_arrays.pack(biases, wire_arrays.F32)
    if asked.allowed_token_ids:
        resolved.allowed_token_ids = wire_arrays.pack(sorted(set(asked.allowed_token_ids)))
    return resolved


def _beam(beam: inference_pb2.BeamSearch) -> common_pb2.BeamRules:
    return common_pb2.BeamRules(
        length_penalty=beam.length_penalty if beam.HasField("length_penalty") else 1.0,
        stop=beam.early_stopping or common_pb2.BEAM_STOP_WHEN_UNBEATABLE,
    )


def _resolved_stop(stop: inference_pb2.StopConditions, room: int) -> common_pb2.StopRules:
    max_tokens = min(stop.max_tokens, room) if stop.HasField("max_tokens") else room
    return common_pb2.StopRules(
        max_tokens=max_tokens,
        min_tokens=min(stop.min_tokens, max_tokens),
        ignore_eos=stop.ignore_eos,
        stop_token_ids=stop.stop_token_ids,
    )
