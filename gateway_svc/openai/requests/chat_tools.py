"""Convert tools and tool choice of OpenAI's JSON. Pure.

`strict` is accepted without effect: a grammar constrains all tools alike.
"""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from gateway_svc.http.json_body import json_text, refuse
from protos.inference.v1 import inference_pb2 as pb

MAX_TOOLS = 128

_MODES = {"none": pb.TOOL_MODE_NONE, "auto": pb.TOOL_MODE_AUTO, "required": pb.TOOL_MODE_REQUIRED}


class _Function(BaseModel):
    model_config = ConfigDict(strict=True)

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class ChatTool(BaseModel):
    """A function that the model may call."""

    model_config = ConfigDict(strict=True)

    type: Literal["function"] = "function"
    function: _Function


class _Name(BaseModel):
    model_config = ConfigDict(strict=True)

    name: str


class NamedTool(BaseModel):
    """A choice of one function."""

    model_config = ConfigDict(strict=True)

    type: Literal["function"]
    function: _Name


class _Allowed(BaseModel):
    model_config = ConfigDict(strict=True)

    mode: Literal["auto", "required"]
    tools: Annotated[list[NamedTool], Field(fail_fast=True, min_length=1, max_length=MAX_TOOLS)]


class AllowedTools(BaseModel):
    """A choice of some tools, as if the others had not been sent."""

    model_config = ConfigDict(strict=True)

    type: Literal["allowed_tools"]
    allowed_tools: _Allowed


ToolChoiceField = Literal["none", "auto", "required"] | Annotated[NamedTool | AllowedTools, Field(discriminator="type")]


def set_tools(
    request: pb.ChatRequest, tools: list[ChatTool], choice: ToolChoiceField | None, *, parallel: bool | None
) -> None:
    """Set the callable tools. Raises InvalidArgument for a choice of tools that were not sent."""
    if isinstance(choice, AllowedTools):
        names = [tool.function.name for tool in choice.allowed_tools.tools]
        _check_known(names, tools)
        tools = [tool for tool in tools if tool.function.name in names]
        choice = choice.allowed_tools.mode
    elif isinstance(choice, NamedTool):
        _check_known([choice.function.name], tools)
        request.tool_choice.name = choice.function.name
    elif choice == "required" and not tools:
        refuse("tool_choice", "is 'required', and there are no tools; send tools")
    if isinstance(choice, str) and tools:
        request.tool_choice.mode = _MODES[choice]
    if parallel is not None and tools:
        request.parallel_tool_calls = parallel
    for i, tool in enumerate(tools):
        _add(request, i, tool.function)


def _check_known(names: list[str], tools: list[ChatTool]) -> None:
    known = {tool.function.name for tool in tools}
    for name in names:
        if name not in known:
            refuse("tool_choice", "names none of the tools sent")


def _add(request: pb.ChatRequest, i: int, function: _Function) -> None:
    schema = function.parameters
    request.tools.add(
        name=function.name,
        description=function.description or "",
        parameters_json=json_text(schema, f"tools[{i}].function.parameters") if schema else "",
    )
