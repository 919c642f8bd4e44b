"""What all requests of OpenAI's API have in common: bodies, types, the fields that sample and stop, and refusals. Pure.

Unknown fields are accepted, as OpenAI-compatible servers do; known ones that would change the output and are not supported are
refused, never ignored. vLLM's extra fields work under vLLM's names, but `priority` has our polarity: higher = sooner.
"""

import json
from collections.abc import Mapping
from typing import Annotated, Any, Literal, NoReturn, TypeVar

import pydantic
from pydantic import BaseModel, ConfigDict, Field

from protos.common.v1 import common_pb2
from protos.inference.v1 import inference_pb2 as pb
from svc_common.errors import FieldViolation, InvalidArgument

U32 = Annotated[int, Field(ge=0, le=2**32 - 1)]
I32 = Annotated[int, Field(ge=-(2**31) + 1, le=2**31 - 1)]

_EARLY_STOPPING: dict[bool | str | None, common_pb2.BeamStop] = {
    None: common_pb2.BEAM_STOP_UNSPECIFIED,
    False: common_pb2.BEAM_STOP_WHEN_UNBEATABLE,
    True: common_pb2.BEAM_STOP_WHEN_ENOUGH,
    "never": common_pb2.BEAM_STOP_NEVER,
}

T = TypeVar("T", bound=BaseModel)


class _StreamOptions(BaseModel):
    model_config = ConfigDict(strict=True)

    include_usage: bool | None = None


class GenerationFields(BaseModel):
    """Fields that completions and chat share."""

    model_config = ConfigDict(strict=True, extra="ignore")

    model: str = ""
    stream: bool | None = None
    stream_options: _StreamOptions | None = None
    n: U32 | None = None
    best_of: U32 | None = None
    max_tokens: U32 | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: Annotated[int, Field(ge=-1, le=2**32 - 1)] | None = None
    min_p: float | None = None
    seed: Annotated[int, Field(ge=-(2**63), le=2**64 - 1)] | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    allowed_token_ids: list[U32] | None = None
    bad_words: list[str] | None = None
    use_beam_search: bool | None = None
    length_penalty: float | None = None
    early_stopping: bool | Literal["never"] | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[U32] | None = None
    min_tokens: U32 | None = None
    ignore_eos: bool | None = None
    prompt_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    priority: I32 | None = None
    cache_salt: str | None = None

    @property
    def include_usage(self) -> bool:
        """Whether a stream ends with a chunk of usage."""
        return bool(self.stream_options and self.stream_options.include_usage)

    def fill(self, request: pb.GenerateRequest | pb.ChatRequest) -> None:
        """Everything but prompt, structured output and log probabilities of the output; absent stays absent."""
        request.model = self.model
        self._fill_sampling(request.sampling)
        if self.use_beam_search:
            self._fill_beam(request.sampling.beam)
        elif self.length_penalty not in (None, 1) or self.early_stopping is not None:
            refuse("length_penalty", "and early_stopping need use_beam_search")
        set_given(request.stop, max_tokens=self.max_tokens, min_tokens=self.min_tokens, ignore_eos=self.ignore_eos)
        request.stop.stop_strings.extend([self.stop] if isinstance(self.stop, str) else self.stop or [])
        request.stop.stop_token_ids.extend(self.stop_token_ids or [])
        if self.stream and self.prompt_logprobs is not None:
            refuse("prompt_logprobs", "is not available in a stream; send stream=false, or use the gRPC API")
        set_given(request.response, num_prompt_logprobs=self.prompt_logprobs)
        set_given(request.scheduling, priority=self.priority)
        set_given(request.cache, cache_salt=self.cache_salt)

    def _fill_sampling(self, sampling: pb.SamplingParams) -> None:
        set_given(sampling, n=self.n, best_of=self.best_of)
        set_given(sampling, temperature=self.temperature, top_p=self.top_p, min_p=self.min_p)
        set_given(sampling, top_k=max(self.top_k, 0) if self.top_k is not None else None)
        set_given(sampling, seed=self.seed % 2**64 if self.seed is not None else None)
        set_given(
            sampling,
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            repetition_penalty=self.repetition_penalty,
        )
        for token_id, bias in (self.logit_bias or {}).items():
            sampling.logit_bias[_token_id(token_id)] = bias
        sampling.allowed_token_ids.extend(self.allowed_token_ids or [])
        sampling.bad_words.extend(self.bad_words or [])

    def _fill_beam(self, beam: pb.BeamSearch) -> None:
        beam.SetInParent()
        set_given(beam, length_penalty=self.length_penalty)
        beam.early_stopping = _EARLY_STOPPING[self.early_stopping]


def _token_id(text: str) -> int:
    if not (text.isascii() and text.isdigit() and int(text) < 2**32):
        refuse("logit_bias", f"has the key {text[:32]!r}, which is no token id")
    return int(text)


# --- bodies ------------------------------------------------------------------------------------------------------------


def parse_body(cls: type[T], body: bytes, neutral: Mapping[str, tuple[Any, ...]]) -> tuple[T, Mapping[str, Any]]:
    """A request body as `cls`, and all of its fields. InvalidArgument for what is no JSON object and for wrong types.

    neutral: fields that are not supported, with the values that change nothing (None is always one); others are refused.
    """
    fields = _json_object(body)
    for name, allowed in neutral.items():
        value = fields.get(name)
        if value is not None and value not in allowed:
            refuse(name, "this value is not supported by this server; leave the field out")
    try:
        return cls.model_validate(fields), fields
    except pydantic.ValidationError as error:
        wrong = error.errors(include_url=False, include_context=False, include_input=False)
        # Of a field with several possible types each has its complaint; the first says enough.
        first = {str(entry["loc"][0]): entry["msg"] for entry in reversed(wrong)}
        violations = [FieldViolation(name, message) for name, message in first.items()]
        text = "; ".join(f"{v.field}: {v.description}" for v in violations)
        raise InvalidArgument(text, reason="INVALID_FIELD", violations=violations) from None


def _json_object(body: bytes) -> Mapping[str, Any]:
    try:
        text = body.decode()
        fields = json.loads(text, parse_constant=_no_constant)
        if "\\ud" in text.lower():
            json.dumps(fields, ensure_ascii=False).encode()  # an escaped lone surrogate is no text
    except (ValueError, RecursionError) as error:
        raise InvalidArgument.field("body", f"is no JSON in UTF-8: {error}") from None
    if not isinstance(fields, dict):
        raise InvalidArgument.field("body", "is no JSON object")
    return fields


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON number")


def set_given(message: Any, **fields: Any) -> None:
    """Sets the fields that are not None."""
    for name, value in fields.items():
        if value is not None:
            setattr(message, name, value)


def prompts_of(given: str | list[str] | list[int] | list[list[int]]) -> list[str | list[int]]:
    """One prompt or several, each text or token ids."""
    if isinstance(given, str):
        return [given]
    token_ids = [item for item in given if isinstance(item, int)]
    return [token_ids] if token_ids else [item for item in given if not isinstance(item, int)]


def refuse(field: str, description: str) -> NoReturn:
    """InvalidArgument for a wish that this server cannot fulfil."""
    raise InvalidArgument(
        f"{field}: {description}", reason="UNSUPPORTED_FIELD", violations=[FieldViolation(field, description)]
    )
