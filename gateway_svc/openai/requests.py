"""Completions and chat as OpenAI clients send them, as messages of our own API. Pure. `max_tokens` left out = up to the context."""

from collections.abc import Sequence
from typing import Annotated, Any, ClassVar

from pydantic import BaseModel, ConfigDict, Field

from gateway_svc.openai.fields import U32, GenerationFields, parse_body, prompts_of, refuse, set_given
from gateway_svc.openai.structured import set_structured_output
from protos.inference.v1 import inference_pb2 as pb

MAX_PROMPTS = 128
MAX_TOP_LOGPROBS = 20

# Values that change nothing; any other value of these fields is refused. None is always one of them.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "add_generation_prompt": (True,),
    "audio": (),
    "chat_template": (),
    "chat_template_kwargs": ({},),
    "continue_final_message": (False,),
    "documents": ([],),
    "echo": (False,),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "guided_whitespace_pattern": (),
    "include_stop_str_in_output": (False,),
    "logits_processors": ([],),
    "modalities": (["text"],),
    "prediction": (),
    "prompt_embeds": (),
    "reasoning_effort": (),
    "skip_special_tokens": (True,),
    "suffix": ("",),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "truncate_prompt_tokens": (),
    "web_search_options": (),
}


class CompletionRequest(GenerationFields):
    """POST /v1/completions. `logprobs`: of the chosen token and of so many of the likeliest."""

    NEUTRAL: ClassVar = _NEUTRAL | {"top_logprobs": (0,), "max_completion_tokens": ()}

    prompt: str | list[str] | list[U32] | list[list[U32]]
    logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None

    def messages(self) -> Sequence[pb.GenerateRequest | pb.ChatRequest]:
        """One request for each prompt."""
        prompts = prompts_of(self.prompt)
        if not 1 <= len(prompts) <= MAX_PROMPTS:
            refuse("prompt", f"has {len(prompts)} prompts; send 1 to {MAX_PROMPTS}")
        return [self._message(prompt) for prompt in prompts]

    def _message(self, prompt: str | list[int]) -> pb.GenerateRequest:
        request = pb.GenerateRequest()
        if isinstance(prompt, str):
            request.text = prompt
        else:
            request.token_ids.SetInParent()
            request.token_ids.ids.extend(prompt)
        self.fill(request)
        if self.logprobs is not None:
            set_given(request.response, logprobs=True, num_top_logprobs=self.logprobs or None)
        return request


class _ContentPart(BaseModel):
    model_config = ConfigDict(strict=True)

    type: str
    text: str = ""


class _Message(BaseModel):
    model_config = ConfigDict(strict=True, extra="allow")

    role: str
    content: str | list[_ContentPart] | None = None


class ChatCompletionRequest(GenerationFields):
    """POST /v1/chat/completions."""

    NEUTRAL: ClassVar = _NEUTRAL

    chat_messages: list[_Message] = Field(alias="messages")
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    max_completion_tokens: U32 | None = None

    def messages(self) -> Sequence[pb.GenerateRequest | pb.ChatRequest]:
        """One request: conversations cannot be batched."""
        if self.top_logprobs and not self.logprobs:
            refuse("top_logprobs", "needs logprobs to be true")
        if self.max_completion_tokens is not None:
            self.max_tokens = self.max_completion_tokens
        request = pb.ChatRequest()
        for i, message in enumerate(self.chat_messages):
            request.messages.add(role=message.role, content=_content(i, message))
        self.fill(request)
        set_given(request.response, logprobs=self.logprobs or None, num_top_logprobs=self.top_logprobs or None)
        return [request]


AnyOpenAiRequest = CompletionRequest | ChatCompletionRequest


def parse_request(
    cls: type[AnyOpenAiRequest], body: bytes
) -> tuple[AnyOpenAiRequest, Sequence[pb.GenerateRequest | pb.ChatRequest]]:
    """A request body, and what it asks of our API. InvalidArgument for no JSON object, wrong types and unsupported wishes."""
    request, fields = parse_body(cls, body, cls.NEUTRAL)
    messages = request.messages()
    for message in messages:
        set_structured_output(message, fields)
    return request, messages


def _content(i: int, message: _Message) -> str:
    extra = message.model_extra or {}
    for name in ("tool_calls", "function_call", "audio"):
        if extra.get(name):
            refuse(f"messages[{i}].{name}", "is not supported by this server")
    if message.content is None:
        refuse(f"messages[{i}].content", "is missing")
    if isinstance(message.content, str):
        return message.content
    for k, part in enumerate(message.content):
        if part.type != "text":
            refuse(f"messages[{i}].content[{k}]", f"is of type {part.type[:32]!r}; only text is supported")
    return "".join(part.text for part in message.content)
