"""Convert tools and tool choice of the Responses API. Pure. Functions only: tools that OpenAI hosts are refused by name."""

from collections.abc import Sequence
from typing import Annotated, Any, Literal, NoReturn

from pydantic import BaseModel, ConfigDict, Field

from gateway_svc.http.json_body import refuse
from gateway_svc.openai.requests.chat_tools import (
    MAX_TOOLS,
    AllowedTools,
    ChatTool,
    NamedTool,
    ToolChoiceField,
    set_tools,
)
from protos.inference.v1 import inference_pb2 as pb

_OTHERS = {
    *("apply_patch", "code_interpreter", "computer", "computer_use_preview", "custom", "file_search"),
    *("image_generation", "local_shell", "mcp", "namespace", "programmatic_tool_calling", "shell", "tool_search"),
    *("web_search", "web_search_2025_08_26", "web_search_preview", "web_search_preview_2025_03_11"),
}


class ResponseTool(BaseModel):
    """A tool. `type`: only `function` is supported."""

    model_config = ConfigDict(strict=True)

    type: str
    name: str = ""
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class _Choice(BaseModel):
    model_config = ConfigDict(strict=True)

    type: str
    name: str = ""


class ResponseToolChoice(_Choice):
    """A choice of one function, or of some (`allowed_tools`)."""

    mode: Literal["auto", "required"] = "auto"
    tools: Annotated[list[_Choice], Field(fail_fast=True, max_length=MAX_TOOLS)] = []


def set_response_tools(
    request: pb.ChatRequest,
    tools: Sequence[ResponseTool],
    choice: str | ResponseToolChoice | None,
    *,
    parallel: bool | None,
) -> None:
    """Set the callable tools. Raises InvalidArgument for tools of other types and for choices of tools not sent."""
    for i, tool in enumerate(tools):
        if tool.type != "function":
            _refuse_type(f"tools[{i}]", tool.type)
    chat_tools = [ChatTool.model_validate({"function": tool.model_dump(exclude={"type"})}) for tool in tools]
    set_tools(request, chat_tools, _chat_choice(choice), parallel=parallel)


def _chat_choice(choice: str | ResponseToolChoice | None) -> ToolChoiceField | None:
    """The choice in the form of chat completions."""
    if not isinstance(choice, ResponseToolChoice):
        return choice  # type: ignore[return-value]
    if choice.type == "function":
        return _named(choice)
    if choice.type != "allowed_tools":
        _refuse_type("tool_choice", choice.type)
    for k, tool in enumerate(choice.tools):
        if tool.type != "function":
            _refuse_type(f"tool_choice.tools[{k}]", tool.type)
    if not choice.tools:
        refuse("tool_choice.tools", "is empty; name the tools that may be called")
    names = [_named(tool) for tool in choice.tools]
    allowed = {"mode": choice.mode, "tools": names}
    return AllowedTools.model_validate({"type": "allowed_tools", "allowed_tools": allowed})


def _named(choice: _Choice) -> NamedTool:
    return NamedTool.model_validate({"type": "function", "function": {"name": choice.name}})


def _refuse_type(where: str, kind: str) -> NoReturn:
    named = f"of type {kind}" if kind in _OTHERS else "of an unknown type"
    refuse(where, f"is {named}; this server takes tools of type function")
