"""POST /v1/messages and /v1/messages/count_tokens: convert the body to a ChatRequest. Pure.

The rules of docs/openai.md hold: what has no effect on the output is accepted, what would have one and is not
supported is refused, what is left out takes the model's default.
"""

from typing import Annotated, Any, ClassVar, Literal, NoReturn, Self

from pydantic import BaseModel, ConfigDict, Field

from gateway_svc.anthropic.content_blocks import MessageTurn, SystemPrompt, add_turns
from gateway_svc.anthropic.offered_tools import OfferedTool, ToolUseChoice, offer_tools
from gateway_svc.anthropic.thinking import ThinkingConfig
from gateway_svc.checks.parameter_checks import MAX_MESSAGES
from gateway_svc.checks.tool_checks import MAX_TOOLS
from gateway_svc.http.json_body import I32, U32, Texts, json_text, parse_body, refuse
from protos.inference.v1 import inference_pb2 as pb
from svc_common.errors import FieldViolation, InvalidArgument

_KEPT_THINKING = {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}
_USE_FORMAT = "send output_config with a format"
_USE_SAMPLING = "use temperature, top_p or top_k"
_LEAVE_OUT = "leave the field out"

_REFUSED: dict[str, tuple[tuple[Any, ...], str]] = {
    # Anthropic's
    "compaction": ((), "shorten the messages before you send them"),
    "container": ((), _LEAVE_OUT),
    "context_management": (({}, {"edits": []}, _KEPT_THINKING), "shorten the messages before you send them"),
    "mcp_servers": (([],), "send tools, and call the server yourself"),
    "output_format": ((), _USE_FORMAT),
    # OpenAI's and vLLM's
    "frequency_penalty": ((0,), _USE_SAMPLING),
    "max_completion_tokens": ((), "send max_tokens"),
    "min_p": ((0,), _USE_SAMPLING),
    "n": ((1,), "send a request for each answer"),
    "presence_penalty": ((0,), _USE_SAMPLING),
    "reasoning_effort": ((), "send output_config with an effort"),
    "repetition_penalty": ((1,), _USE_SAMPLING),
    "response_format": (({"type": "text"},), _USE_FORMAT),
    "stop": (([],), "send stop_sequences"),
    "structured_outputs": ((), _USE_FORMAT),
}


class OutputFormat(BaseModel):
    """A JSON schema that the answer's text must match."""

    model_config = ConfigDict(strict=True)

    type: Literal["json_schema"]
    json_schema: dict[str, Any] = Field(alias="schema")


class OutputConfig(BaseModel):
    """The field `output_config`. `effort`: the template's `reasoning_effort`, where it has one."""

    model_config = ConfigDict(strict=True)

    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: OutputFormat | None = None


class CountTokensBody(BaseModel):
    """What determines the prompt."""

    model_config = ConfigDict(strict=True, extra="ignore")
    NEUTRAL: ClassVar = {name: values for name, (values, _) in _REFUSED.items()}
    INSTEAD: ClassVar = {name: instead for name, (_, instead) in _REFUSED.items()}

    model: str = ""
    messages: Annotated[list[MessageTurn], Field(fail_fast=True, max_length=MAX_MESSAGES)]
    system: SystemPrompt | None = None
    tools: Annotated[list[OfferedTool], Field(fail_fast=True, max_length=MAX_TOOLS)] | None = None
    tool_choice: ToolUseChoice | None = None
    thinking: ThinkingConfig | None = None
    output_config: OutputConfig | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    thread: Any = None

    @classmethod
    def parse(cls, body: bytes) -> Self:
        """Parse a body. Raises InvalidArgument for no JSON object, wrong types and unsupported values."""
        request, _ = parse_body(cls, body, cls.NEUTRAL, instead=cls.INSTEAD)
        if request.thread is not None:
            _refuse_thread()
        return request

    def chat_request(self) -> pb.ChatRequest:
        """Convert to a ChatRequest."""
        request = pb.ChatRequest(model=self.model)
        add_turns(request, self.system, self.messages)
        offer_tools(request, self.tools or [], self.tool_choice)
        if variables := self._template_variables():
            request.template_arguments_json = json_text(variables, "chat_template_kwargs")
        if self.output_config is not None and self.output_config.format is not None:
            request.json_schema = json_text(self.output_config.format.json_schema, "output_config.format.schema")
        return request

    def _template_variables(self) -> dict[str, Any]:
        """Template variables; explicit ones override those derived from other fields."""
        thinking = self.thinking.template_variables() if self.thinking is not None else {}
        effort = self.output_config.effort if self.output_config is not None else None
        return thinking | ({"reasoning_effort": effort} if effort else {}) | (self.chat_template_kwargs or {})


def _refuse_thread() -> NoReturn:
    """Refuse by the code on which Anthropic's packages send the request again, with the whole conversation."""
    why = "is not supported: this server keeps no conversations; send all messages, without thread"
    violation = FieldViolation("thread", why)
    raise InvalidArgument(f"thread: {why}", reason="THREAD_UNSUPPORTED_REQUEST", violations=[violation])


class MessageBody(CountTokensBody):
    """The whole request. `seed`, `priority`, `cache_salt` and `chat_template_kwargs` are as in the OpenAI API."""

    max_tokens: U32
    stream: bool | None = None
    stop_sequences: Texts | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: U32 | None = None
    seed: Annotated[int, Field(ge=-(2**63), le=2**64 - 1)] | None = None
    priority: I32 | None = None
    cache_salt: str | None = None

    @property
    def omits_thinking(self) -> bool:
        """True if thinking blocks are sent without their text."""
        return self.thinking is not None and self.thinking.display == "omitted"

    def chat_request(self) -> pb.ChatRequest:
        """Convert to a ChatRequest; absent fields stay absent."""
        if self.max_tokens == 0:
            refuse("max_tokens", "is 0; send at least 1: prompts are cached when they are used")
        request = super().chat_request()
        given = pb.ChatRequest(
            sampling=pb.SamplingParams(
                temperature=self.temperature,
                top_p=self.top_p,
                top_k=self.top_k,
                seed=self.seed % 2**64 if self.seed is not None else None,
            ),
            stop=pb.StopConditions(max_tokens=self.max_tokens, stop_strings=self.stop_sequences),
            scheduling=pb.Scheduling(priority=self.priority),
            cache=pb.CacheOptions(cache_salt=self.cache_salt),
        )
        request.MergeFrom(given)
        return request
