"""Convert a ChatRequest to the input of chat templates: OpenAI's messages and tools, as in transformers. Pure."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from pydantic_core import from_json

from protos.inference.v1 import inference_pb2 as pb

NO_PARAMETERS = {"type": "object", "properties": {}}
NO_ARGUMENTS = {**NO_PARAMETERS, "additionalProperties": False}
ANY_PARAMETERS = {"type": "object"}


def template_messages(messages: Sequence[pb.Message]) -> list[dict[str, Any]]:
    """Messages with role and content always and other keys only if set, since templates test for keys."""
    return [_message(message) for message in messages]


def _message(message: pb.Message) -> dict[str, Any]:
    given: dict[str, Any] = {"role": message.role, "content": message.content}
    if message.name:
        given["name"] = message.name
    if message.reasoning:
        given["reasoning_content"] = message.reasoning
        # Read by gpt-oss's template, which refuses both this and content beside calls.
        if not (message.content and message.tool_calls):
            given["thinking"] = message.reasoning
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
    """Arguments of a call as an object, which templates write as JSON again.

    Model output that is no object stays text.
    """
    try:
        arguments = from_json(text or "{}")
    except ValueError:
        return text
    return arguments if isinstance(arguments, dict) else text


def told_tools(request: pb.ChatRequest) -> Sequence[pb.Tool]:
    """Tools shown to the model: none if it may not call any."""
    return () if request.tool_choice.mode == pb.TOOL_MODE_NONE else request.tools


def template_tools(tools: Sequence[pb.Tool]) -> list[dict[str, Any]]:
    """Tools in OpenAI's form."""
    return [{"type": "function", "function": _function(tool)} for tool in tools]


def _function(tool: pb.Tool) -> dict[str, Any]:
    described = {"description": tool.description} if tool.description else {}
    return {"name": tool.name, **described, "parameters": parameters_of(tool)}


def parameters_of(tool: pb.Tool) -> Mapping[str, Any]:
    """JSON schema of the tool's arguments."""
    return json.loads(tool.parameters_json) if tool.parameters_json else NO_PARAMETERS


def template_variables(request: pb.ChatRequest) -> Mapping[str, Any]:
    """Additional template variables of the request."""
    text = request.template_arguments_json
    return json.loads(text) if text else {}
