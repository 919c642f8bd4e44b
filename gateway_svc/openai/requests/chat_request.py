"""POST /v1/chat/completions: convert the body to a ChatRequest. Pure."""

from dataclasses import replace
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from gateway_svc.http.json_body import U32, json_text, refuse, unset_if_none
from gateway_svc.openai.answers.answer_options import AnswerOptions
from gateway_svc.openai.requests.chat_messages import MAX_MESSAGES, ChatMessage, add_message
from gateway_svc.openai.requests.chat_tools import MAX_TOOLS, ChatTool, ToolChoiceField, set_tools
from gateway_svc.openai.requests.fields import NEUTRAL, AnyRequests, GenerationFields, TopLogprobs
from protos.inference.v1 import inference_pb2 as pb

Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]


class ChatCompletionRequest(GenerationFields):
    """The request body. `reasoning_effort` is passed to the chat template with `chat_template_kwargs`."""

    NEUTRAL: ClassVar = NEUTRAL | {
        "audio": (),
        "chat_template": (),
        "documents": ([],),
        "echo": (False,),
        "modalities": (["text"],),
        "suffix": ("",),
        "verbosity": ("medium",),
        "web_search_options": (),
    }

    chat_messages: Annotated[list[ChatMessage], Field(fail_fast=True, max_length=MAX_MESSAGES)] = Field(
        alias="messages"
    )
    logprobs: bool | None = None
    top_logprobs: TopLogprobs | None = None
    max_completion_tokens: U32 | None = None
    tools: Annotated[list[ChatTool], Field(fail_fast=True, max_length=MAX_TOOLS)] | None = None
    tool_choice: ToolChoiceField | None = None
    parallel_tool_calls: bool | None = None
    functions: list[Any] | None = None
    function_call: Any = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    add_special_tokens: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: Effort | None = None
    include_reasoning: bool | None = None

    def options(self) -> AnswerOptions:
        """What the answer shows."""
        return replace(super().options(), reasoning=self.include_reasoning is not False)

    def messages(self) -> AnyRequests:
        """Return the one request; chats cannot be batched."""
        self._refuse_legacy()
        if self.top_logprobs and not self.logprobs:
            refuse("top_logprobs", "needs logprobs to be true")
        if self.max_completion_tokens is not None:
            self.max_tokens = self.max_completion_tokens
        request = pb.ChatRequest(
            response=pb.ResponseOptions(
                logprobs=unset_if_none(self.logprobs or None), num_top_logprobs=self.top_logprobs or None
            ),
            add_generation_prompt=unset_if_none(self.add_generation_prompt),
            continue_final_message=unset_if_none(self.continue_final_message),
            add_special_tokens=unset_if_none(self.add_special_tokens),
        )
        for i, message in enumerate(self.chat_messages):
            add_message(request, i, message)
        self.fill(request)
        set_tools(request, self.tools or [], self.tool_choice, parallel=self.parallel_tool_calls)
        if arguments := self._template_arguments():
            request.template_arguments_json = json_text(arguments, "chat_template_kwargs")
        return [request]

    def _refuse_legacy(self) -> None:
        if self.functions:
            refuse("functions", "is OpenAI's old way; send tools")
        if self.function_call not in (None, "none", "auto"):
            refuse("function_call", "is OpenAI's old way; send tool_choice")

    def _template_arguments(self) -> dict[str, Any]:
        """Template variables; explicit ones override those derived from `reasoning_effort`."""
        return effort_variables(self.reasoning_effort) | (self.chat_template_kwargs or {})


def effort_variables(effort: Effort | None) -> dict[str, Any]:
    """Template variables of a reasoning effort."""
    if effort is None:
        return {}
    return {"reasoning_effort": effort} | ({"enable_thinking": False} if effort == "none" else {})
