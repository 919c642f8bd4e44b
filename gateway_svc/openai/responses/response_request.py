"""POST /v1/responses: convert the body, and the conversation it continues, to a ChatRequest. Pure."""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field

from gateway_svc.http.json_body import U32, json_text, parse_body, refuse, unset_if_none
from gateway_svc.openai.requests import foreign_fields
from gateway_svc.openai.requests.chat_messages import MAX_MESSAGES
from gateway_svc.openai.requests.chat_request import Effort, effort_variables
from gateway_svc.openai.requests.chat_tools import MAX_TOOLS
from gateway_svc.openai.requests.fields import NEUTRAL, AnyRequests, GenerationFields, StreamOptions, TopLogprobs
from gateway_svc.openai.requests.structured import FIELDS, set_structured_output
from gateway_svc.openai.responses.input_items import Json, add_items
from gateway_svc.openai.responses.tools import ResponseTool, ResponseToolChoice, set_response_tools
from protos.inference.v1 import inference_pb2 as pb

LOGPROBS = "message.output_text.logprobs"
CARRIED_REASONING = "reasoning.encrypted_content"
_INSTEAD = {
    "conversation": "send previous_response_id, or the items of the conversation as input",
    "max_completion_tokens": "send max_output_tokens",
    "max_tokens": "send max_output_tokens",
    "prompt": "send instructions and input",
    "reasoning_effort": "send reasoning.effort",
    "response_format": "send text.format",
    "truncation": "send a shorter conversation",
}


class ResponseFormat(BaseModel):
    """Format of the output text. `schema`: of json_schema; `name`, `strict` and `description` have no effect."""

    model_config = ConfigDict(strict=True)

    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    description: str | None = None
    schema_: dict[str, Any] | None = Field(None, alias="schema")
    strict: bool | None = None


class ResponseText(BaseModel):
    """Options of the output text."""

    model_config = ConfigDict(strict=True)

    format: ResponseFormat | None = None
    verbosity: Literal["low", "medium", "high"] | None = None


class ResponseReasoning(BaseModel):
    """Options of the reasoning. `summary`: a summary is the whole reasoning, in the place where clients show one."""

    model_config = ConfigDict(strict=True)

    effort: Effort | None = None
    summary: Literal["auto", "concise", "detailed"] | None = None
    generate_summary: Literal["auto", "concise", "detailed"] | None = None


class ResponseStreamOptions(StreamOptions):
    """Options of a stream. None has an effect: usage is always sent, and deltas have no padding."""

    include_obfuscation: bool | None = None


class ResponseRequest(GenerationFields):
    """The request body. `input`: a text, or items (`input_items`)."""

    NEUTRAL: ClassVar = NEUTRAL | {
        "best_of": (1,),
        "context_management": ([],),
        "conversation": (),
        "echo": (False,),
        "max_completion_tokens": (),
        "max_tokens": (),
        "moderation": (),
        "n": (1,),
        "prompt": (),
        "prompt_logprobs": (),
        "reasoning_effort": (),
        "response_format": ({"type": "text"},),
        "return_token_ids": (False,),
        "return_tokens_as_token_ids": (False,),
        "truncation": ("disabled",),
        "use_beam_search": (False,),
    }

    given: str | Annotated[list[dict[str, Any]], Field(fail_fast=True, max_length=MAX_MESSAGES)] = Field(
        default=[], alias="input"
    )
    instructions: str | None = None
    tools: Annotated[list[ResponseTool], Field(fail_fast=True, max_length=MAX_TOOLS)] | None = None
    tool_choice: Literal["none", "auto", "required"] | ResponseToolChoice | None = None
    parallel_tool_calls: bool | None = None
    text: ResponseText | None = None
    reasoning: ResponseReasoning | None = None
    max_output_tokens: U32 | None = None
    max_tool_calls: U32 | None = None
    top_logprobs: TopLogprobs | None = None
    include: Annotated[list[str], Field(fail_fast=True, max_length=64)] | None = None
    previous_response_id: str | None = None
    store: bool | None = None
    background: bool | None = None
    stream_options: ResponseStreamOptions | None = None
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    def items(self) -> list[Json]:
        """Items of `input`; a text is one message of the user."""
        if isinstance(self.given, str):
            return [{"type": "message", "role": "user", "content": [{"type": "input_text", "text": self.given}]}]
        return list(self.given)

    def messages(self) -> AnyRequests:
        """Return the request of `input` alone."""
        return [self.chat_request(self.items())]

    @property
    def with_logprobs(self) -> bool:
        """True if the answer has log probabilities."""
        return LOGPROBS in (self.include or []) or bool(self.top_logprobs)

    @property
    def carries_reasoning(self) -> bool:
        """True if reasoning items have `encrypted_content`."""
        return CARRIED_REASONING in (self.include or [])

    @property
    def summary(self) -> str | None:
        """Kind of summary wanted."""
        asked = self.reasoning or ResponseReasoning()
        return asked.summary or asked.generate_summary

    def chat_request(self, conversation: Sequence[Json]) -> pb.ChatRequest:
        """Make the request: instructions, then the conversation. Raises InvalidArgument for what is not supported."""
        self._check()
        self.max_tokens = self.max_output_tokens
        request = pb.ChatRequest(
            response=pb.ResponseOptions(
                logprobs=unset_if_none(self.with_logprobs or None), num_top_logprobs=self.top_logprobs or None
            )
        )
        if self.instructions:
            request.messages.add(role="system", content=self.instructions)
        add_items(request, conversation)
        self.fill(request)
        set_response_tools(request, self.tools or [], self.tool_choice, parallel=self.parallel_tool_calls)
        request.resumable |= bool(self.background)
        effort = self.reasoning.effort if self.reasoning else None
        if arguments := effort_variables(effort) | (self.chat_template_kwargs or {}):
            request.template_arguments_json = json_text(arguments, "chat_template_kwargs")
        return request

    def _check(self) -> None:
        if not self.given:
            refuse("input", "is missing or empty")
        if self.background and self.store is False:
            refuse("background", "needs the response to be stored; leave store out")
        if self.background and self.stream:
            refuse(
                "background", "is not supported with stream; ask for the response by its id, or leave background out"
            )
        if self.text and self.text.verbosity not in (None, "medium"):
            refuse("text.verbosity", "this value is not supported by this server; leave the field out")
        if self.summary == "concise":
            refuse("reasoning.summary", "is concise, and this server does not shorten reasoning; send auto or detailed")

    def structured(self) -> Mapping[str, Any]:
        """`text.format` as fields that `set_structured_output` knows."""
        wished = self.text.format if self.text else None
        if wished is None or wished.type == "text":
            return {}
        if wished.type == "json_object":
            return {"json_schema": {"type": "object"}}
        if wished.schema_ is None:
            refuse("text.format", "is json_schema without a schema")
        return {"json_schema": wished.schema_}


def parse_response_request(body: bytes) -> tuple[ResponseRequest, Mapping[str, Any]]:
    """Parse a body; returns it and the wishes for structured output. Raises InvalidArgument."""
    request, fields = parse_body(
        ResponseRequest,
        body,
        foreign_fields.NEUTRAL | ResponseRequest.NEUTRAL,
        instead={**foreign_fields.INSTEAD, **_INSTEAD},
        translate=foreign_fields.translated,
    )
    wishes = {name: fields[name] for name in FIELDS if fields.get(name) is not None and name != "response_format"}
    if wishes and request.structured():
        refuse("text.format", f"and {next(iter(wishes))} both wish for structured output; send one")
    return request, wishes or request.structured()


def chat_request(request: ResponseRequest, wishes: Mapping[str, Any], conversation: Sequence[Json]) -> pb.ChatRequest:
    """Make the request for `conversation`, with structured output."""
    message = request.chat_request(conversation)
    set_structured_output(message, wishes)
    return message
