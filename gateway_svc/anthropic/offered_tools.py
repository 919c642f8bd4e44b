"""Convert tools and tool choice of Anthropic's JSON. Pure.

`strict` and `eager_input_streaming` are accepted without effect: a grammar constrains all tools alike, and input
is streamed as it is generated.
"""

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

from gateway_svc.http.json_body import json_text, refuse
from protos.inference.v1 import inference_pb2 as pb

_MODES = {"none": pb.TOOL_MODE_NONE, "auto": pb.TOOL_MODE_AUTO, "any": pb.TOOL_MODE_REQUIRED}
_CUSTOM = (None, "custom")


class OfferedTool(BaseModel):
    """A tool that the client runs. Tools with another `type` run at Anthropic, or have schemas that its models know."""

    model_config = ConfigDict(strict=True)

    type: str | None = None
    name: str
    description: str | None = None
    input_schema: dict[str, Any] | None = None
    defer_loading: bool | None = None
    input_examples: list[dict[str, Any]] | None = None


class ToolUseChoice(BaseModel):
    """The field `tool_choice`. `name`: of type `tool` only."""

    model_config = ConfigDict(strict=True)

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


def offer_tools(request: pb.ChatRequest, tools: list[OfferedTool], choice: ToolUseChoice | None) -> None:
    """Add the tools and the choice. Raises InvalidArgument for tools that are not the client's own."""
    for i, tool in enumerate(tools):
        _add_tool(request, tool, f"tools[{i}]")
    if choice is None:
        return
    if choice.type == "tool":
        if choice.name is None:
            refuse("tool_choice.name", "is missing; which tool?")
        request.tool_choice.name = choice.name
    elif choice.type == "any" and not tools:
        refuse("tool_choice", "is 'any', and there are no tools; send tools")
    elif tools:
        request.tool_choice.mode = _MODES[choice.type]
    if choice.disable_parallel_tool_use is not None and tools:
        request.parallel_tool_calls = not choice.disable_parallel_tool_use


def _add_tool(request: pb.ChatRequest, tool: OfferedTool, where: str) -> None:
    if tool.type not in _CUSTOM:
        refuse(
            f"{where}.type", "is that of a tool of Anthropic's; this server offers custom tools, with an input_schema"
        )
    if tool.input_schema is None:
        refuse(f"{where}.input_schema", "is missing; send the JSON schema of the tool's input")
    if tool.defer_loading:
        refuse(
            f"{where}.defer_loading", "needs a tool that searches tools, which this server does not have; leave it out"
        )
    if tool.input_examples:
        refuse(f"{where}.input_examples", "has no place in chat templates; put examples into description")
    request.tools.add(
        name=tool.name,
        description=tool.description or "",
        parameters_json=json_text(tool.input_schema, f"{where}.input_schema") if tool.input_schema else "",
    )
