"""A ChatRequest in the form that chat templates expect: OpenAI's messages and tools, as transformers hands them on. Pure."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from protos.inference.v1 import inference_pb2 as pb

NO_PARAMETERS = {"type": "object", "properties": {}}
NO_ARGUMENTS = {**NO_PARAMETERS, "additionalProperties": False}
ANY_PARAMETERS = {"type": "object"}


def template_messages(messages: Sequence[pb.Message]) -> list[dict[str, Any]]:
    """Role and content always, the rest where it is there: templates ask for the presence of keys."""
    return [_message(message) for message in messages]


def _message(message: pb.Message) -> dict[str, Any]:
    given: dict[str, Any] = {"role": message.role, "content": message.content}
    if message.name:
        given["name"] = message.name
    if message.reasoning:
        given["reasoning_content"] = message.reasoning
    if message.tool_calls:
        given["tool_calls"] = [_call(call) for call in message.tool_calls]
    if message.tool_call_id:
        given["tool_call_id"] = message.tool_call_id
    return given


def _call(call: pb.ToolCall) -> dict[str, Any]:
    identity = {"id": call.id} if call.id else {}
    function = {"name": call.name, "arguments": template_arguments(call.arguments)}
    return {**identity, "type": "function", "function": function}


def template_arguments(text: str) -> Any:
    """A call's arguments as an object, which templates write as JSON again. What a model wrote that is none stays text."""
    try:
        arguments = json.loads(text or "{}")
    except (ValueError, RecursionError):
        return text
    return arguments if isinstance(arguments, dict) else text


def told_tools(request: pb.ChatRequest) -> Sequence[pb.Tool]:
    """Tools that the model is told of: none where it may call none."""
    return () if request.tool_choice.mode == pb.TOOL_MODE_NONE else request.tools


def template_tools(tools: Sequence[pb.Tool]) -> list[dict[str, Any]]:
    """OpenAI's form."""
    return [{"type": "function", "function": _function(tool)} for tool in tools]


def _function(tool: pb.Tool) -> dict[str, Any]:
    described = {"description": tool.description} if tool.description else {}
    return {"name": tool.name, **described, "parameters": parameters_of(tool)}


def parameters_of(tool: pb.Tool) -> Mapping[str, Any]:
    """JSON schema of its arguments."""
    return json.loads(tool.parameters_json) if tool.parameters_json else NO_PARAMETERS  # type: ignore[no-any-return]


def template_variables(request: pb.ChatRequest) -> Mapping[str, Any]:
    """Further variables of the template."""
    text = request.template_arguments_json
    return json.loads(text) if text else {}  # type: ignore[no-any-return]
