"""What OpenAI clients send, as messages of our own API. Pure.

Unknown fields are accepted, as OpenAI-compatible servers do; known ones that would change the output and are not supported are
refused, never ignored. vLLM's extra fields `top_k`, `min_tokens`, `ignore_eos`, `stop_token_ids`, `priority` (here: higher =
sooner, unlike vLLM) and `cache_salt` work. `max_tokens` left out means up to the model's context.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, NoReturn

import pydantic
from pydantic import BaseModel, ConfigDict, Field

from protos.inference.v1 import inference_pb2 as pb
from svc_common.errors import FieldViolation, InvalidArgument

MAX_PROMPTS = 128

_U32 = Annotated[int, Field(ge=0, le=2**32 - 1)]
_I32 = Annotated[int, Field(ge=-(2**31) + 1, le=2**31 - 1)]

# Values that change nothing; any other value of these fields is refused. None is always one of them.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "add_generation_prompt": (True,),
    "allowed_token_ids": (),
    "audio": (),
    "bad_words": ([],),
    "best_of": (1,),
    "chat_template": (),
    "chat_template_kwargs": ({},),
    "continue_final_message": (False,),
    "documents": ([],),
    "echo": (False,),
    "frequency_penalty": (0,),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "guided_choice": (),
    "guided_grammar": (),
    "guided_json": (),
    "guided_regex": (),
    "include_stop_str_in_output": (False,),
    "length_penalty": (1,),
    "logit_bias": ({},),
    "logits_processors": ([],),
    "min_p": (0,),
    "modalities": (["text"],),
    "n": (1,),
    "prediction": (),
    "presence_penalty": (0,),
    "prompt_embeds": (),
    "prompt_logprobs": (),
    "reasoning_effort": (),
    "repetition_penalty": (1,),
    "response_format": ({"type": "text"},),
    "skip_special_tokens": (True,),
    "structured_outputs": (),
    "suffix": ("",),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "top_logprobs": (0,),
    "truncate_prompt_tokens": (),
    "use_beam_search": (False,),
    "web_search_options": (),
}


class _StreamOptions(BaseModel):
    model_config = ConfigDict(strict=True)

    include_usage: bool | None = None


class _Request(BaseModel):
    """Fields that completions and chat share."""

    model_config = ConfigDict(strict=True, extra="ignore")

    model: str = ""
    stream: bool | None = None
    stream_options: _StreamOptions | None = None
    max_tokens: _U32 | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: Annotated[int, Field(ge=-1, le=2**32 - 1)] | None = None
    seed: Annotated[int, Field(ge=-(2**63), le=2**64 - 1)] | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[_U32] | None = None
    min_tokens: _U32 | None = None
    ignore_eos: bool | None = None
    priority: _I32 | None = None
    cache_salt: str | None = None

    @property
    def include_usage(self) -> bool:
        """Whether a stream ends with a chunk of usage."""
        return bool(self.stream_options and self.stream_options.include_usage)

    def _fill(self, request: pb.GenerateRequest | pb.ChatRequest, *, logprobs: bool) -> None:
        """Everything but the prompt; absent stays absent."""
        request.model = self.model
        _set(request.sampling, temperature=self.temperature, top_p=self.top_p)
        _set(request.sampling, top_k=max(self.top_k, 0) if self.top_k is not None else None)
        _set(request.sampling, seed=self.seed % 2**64 if self.seed is not None else None)
        _set(request.stop, max_tokens=self.max_tokens, min_tokens=self.min_tokens, ignore_eos=self.ignore_eos)
        request.stop.stop_strings.extend([self.stop] if isinstance(self.stop, str) else self.stop or [])
        request.stop.stop_token_ids.extend(self.stop_token_ids or [])
        _set(request.response, logprobs=logprobs or None)
        _set(request.scheduling, priority=self.priority)
        _set(request.cache, cache_salt=self.cache_salt)


class CompletionRequest(_Request):
    """POST /v1/completions. `logprobs`: 0 or 1 = of the chosen token."""

    prompt: str | list[str] | list[_U32] | list[list[_U32]]
    logprobs: Annotated[int, Field(ge=0)] | None = None

    def messages(self) -> Sequence[pb.GenerateRequest | pb.ChatRequest]:
        """One request for each prompt."""
        if self.logprobs is not None and self.logprobs > 1:
            _refuse("logprobs", "only the chosen token's log probability is supported: send 0 or 1")
        prompts = self._prompts()
        if not 1 <= len(prompts) <= MAX_PROMPTS:
            _refuse("prompt", f"has {len(prompts)} prompts; send 1 to {MAX_PROMPTS}")
        return [self._message(prompt) for prompt in prompts]

    def _prompts(self) -> list[str | list[int]]:
        if isinstance(self.prompt, str):
            return [self.prompt]
        token_ids = [item for item in self.prompt if isinstance(item, int)]
        return [token_ids] if token_ids else [item for item in self.prompt if not isinstance(item, int)]

    def _message(self, prompt: str | list[int]) -> pb.GenerateRequest:
        request = pb.GenerateRequest()
        if isinstance(prompt, str):
            request.text = prompt
        else:
            request.token_ids.SetInParent()
            request.token_ids.ids.extend(prompt)
        self._fill(request, logprobs=self.logprobs is not None)
        return request


class _ContentPart(BaseModel):
    model_config = ConfigDict(strict=True)

    type: str
    text: str = ""


class _Message(BaseModel):
    model_config = ConfigDict(strict=True, extra="allow")

    role: str
    content: str | list[_ContentPart] | None = None


class ChatCompletionRequest(_Request):
    """POST /v1/chat/completions."""

    chat_messages: list[_Message] = Field(alias="messages")
    logprobs: bool | None = None
    max_completion_tokens: _U32 | None = None

    def messages(self) -> Sequence[pb.GenerateRequest | pb.ChatRequest]:
        """One request: conversations cannot be batched."""
        if self.max_completion_tokens is not None:
            self.max_tokens = self.max_completion_tokens
        request = pb.ChatRequest()
        for i, message in enumerate(self.chat_messages):
            request.messages.add(role=message.role, content=_content(i, message))
        self._fill(request, logprobs=bool(self.logprobs))
        return [request]


AnyOpenAiRequest = CompletionRequest | ChatCompletionRequest


def parse_request(cls: type[AnyOpenAiRequest], body: bytes) -> AnyOpenAiRequest:
    """A request body as `cls`. InvalidArgument for what is no JSON object, wrong types and unsupported wishes."""
    fields = _json_object(body)
    for name, neutral in _NEUTRAL.items():
        value = fields.get(name)
        if value is not None and value not in neutral:
            _refuse(name, "this value is not supported by this server; leave the field out")
    try:
        return cls.model_validate(fields)
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


def _content(i: int, message: _Message) -> str:
    extra = message.model_extra or {}
    for name in ("tool_calls", "function_call", "audio"):
        if extra.get(name):
            _refuse(f"messages[{i}].{name}", "is not supported by this server")
    if message.content is None:
        _refuse(f"messages[{i}].content", "is missing")
    if isinstance(message.content, str):
        return message.content
    for k, part in enumerate(message.content):
        if part.type != "text":
            _refuse(f"messages[{i}].content[{k}]", f"is of type {part.type[:32]!r}; only text is supported")
    return "".join(part.text for part in message.content)


def _set(message: Any, **fields: Any) -> None:
    for name, value in fields.items():
        if value is not None:
            setattr(message, name, value)


def _refuse(field: str, description: str) -> NoReturn:
    raise InvalidArgument(
        f"{field}: {description}", reason="UNSUPPORTED_FIELD", violations=[FieldViolation(field, description)]
    )
