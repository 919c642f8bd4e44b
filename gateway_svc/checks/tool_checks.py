"""Checks of a chat's tools, tool choice and template arguments, before rendering. Pure."""

import re
from collections.abc import Sequence
from typing import Any

from pydantic_core import from_json

from gateway_svc.checks.violations import Violations
from protos.inference.v1 import inference_pb2 as pb

MAX_TOOLS = 128
MAX_TOOLS_BYTES = 256 * 1024
MAX_TEMPLATE_ARGUMENTS_BYTES = 64 * 1024
NAME = re.compile(r"[a-zA-Z0-9_.-]{1,64}")
RESERVED_VARIABLES = ("messages", "tools", "add_generation_prompt")

_NO_NAME = "must have 1 to 64 of the characters a-z, A-Z, 0-9, _, - and dots"


def check_tools(request: pb.ChatRequest, found: Violations) -> None:
    """Check tools, tool_choice, template_arguments_json and the calls of earlier turns."""
    _check_list(request.tools, found)
    for i, tool in enumerate(request.tools[:MAX_TOOLS]):
        _check_tool(f"tools[{i}]", tool, found)
    _check_choice(request, found)
    _check_forced(request, found)
    _check_turns(request.messages, found)
    _check_template_arguments(request.template_arguments_json, found)


def is_forced(request: pb.ChatRequest) -> bool:
    """True if the answer must be a call."""
    choice = request.tool_choice
    return choice.WhichOneof("choice") == "name" or choice.mode == pb.TOOL_MODE_REQUIRED


def _check_list(tools: Sequence[pb.Tool], found: Violations) -> None:
    if len(tools) > MAX_TOOLS:
        found.add("tools", f"has {len(tools)} tools; at most {MAX_TOOLS} are allowed")
    num_bytes = sum(tool.ByteSize() for tool in tools)
    good = num_bytes <= MAX_TOOLS_BYTES
    if not good:
        found.add("tools", f"has {num_bytes} bytes; at most {MAX_TOOLS_BYTES} are allowed together")
    seen: set[str] = set()
    for i, tool in enumerate(tools[:MAX_TOOLS]):
        if tool.name in seen:
            found.add(f"tools[{i}].name", "is that of a tool before it, too; calls could not be told apart")
        seen.add(tool.name)


def _check_tool(place: str, tool: pb.Tool, found: Violations) -> None:
    if not NAME.fullmatch(tool.name):
        found.add(f"{place}.name", _NO_NAME)
    if not tool.parameters_json:
        return
    field = f"{place}.parameters_json"
    schema = _json_object(tool.parameters_json, field, found)
    if schema is not None and schema.get("type", "object") != "object":
        found.add(field, 'must be the JSON schema of an object: {"type": "object", ...}')


def _check_choice(request: pb.ChatRequest, found: Violations) -> None:
    kind, choice = request.tool_choice.WhichOneof("choice"), request.tool_choice
    if kind == "mode":
        known = choice.mode in pb.ToolMode.values()
        if not known:
            found.add("tool_choice.mode", f"is {choice.mode}, which is no ToolMode")
        missing = choice.mode == pb.TOOL_MODE_REQUIRED and not request.tools
        if missing:
            found.add("tool_choice.mode", "is REQUIRED, and there are no tools to call")
    elif kind == "name" and not any(tool.name == choice.name for tool in request.tools):
        found.add("tool_choice.name", f"is the name of none of the request's {len(request.tools)} tools")


def _check_forced(request: pb.ChatRequest, found: Violations) -> None:
    if is_forced(request) and request.stop.ignore_eos:
        found.add("stop.ignore_eos", "is true beside a tool_choice that makes the output a call, which has an end")


def _check_turns(messages: Sequence[pb.Message], found: Violations) -> None:
    for i, message in enumerate(messages):
        if message.tool_calls and message.role != "assistant":
            found.add(f"messages[{i}].tool_calls", "belong to an assistant's turn, and its role is another")
        for k, call in enumerate(message.tool_calls):
            if not call.name:
                found.add(f"messages[{i}].tool_calls[{k}].name", "is missing; which tool was called?")


def _check_template_arguments(text: str, found: Violations) -> None:
    field = "template_arguments_json"
    if not text:
        return
    if len(text.encode()) > MAX_TEMPLATE_ARGUMENTS_BYTES:
        found.add(field, f"is longer than {MAX_TEMPLATE_ARGUMENTS_BYTES} bytes")
        return
    variables = _json_object(text, field, found) or {}
    for name in RESERVED_VARIABLES:
        if name in variables:
            found.add(field, f"has the key {name!r}, which comes from the request's own fields")


def _json_object(text: str, field: str, found: Violations) -> dict[str, Any] | None:
    """Parse a JSON object; on failure adds a violation and returns None."""
    try:
        value = from_json(text, allow_inf_nan=False)
    except ValueError as error:
        found.add(field, f"is no JSON: {error}")
        return None
    if not isinstance(value, dict):
        found.add(field, "must be a JSON object")
        return None
    return value
