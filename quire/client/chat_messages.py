"""Convert conversations and tools, in OpenAI's format or flat, to messages of the public API. Pure."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from protos.inference.v1 import inference_pb2 as pb
from quire.client.outputs import ToolCall
from quire.client.value_checks import is_listing, valid_text
from svc_common.errors import InvalidArgument

Message = Mapping[str, Any]
"""{"role": ..., "content": ...}; assistant turns may have "reasoning" and "tool_calls", tool turns have "tool_call_id"."""

_MODES = {"auto": pb.TOOL_MODE_AUTO, "none": pb.TOOL_MODE_NONE, "required": pb.TOOL_MODE_REQUIRED}
_MODE_NAMES = '"auto", "none", "required" or a tool\'s name'


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatOptions:
    """Options of a chat request besides its messages and sampling parameters.

    `tools`: {"name": ..., "description": ..., "parameters": JSON schema} each, or OpenAI's {"type": "function", "function": {...}}.
    `tool_choice`: "auto" (the default if there are tools), "none", "required", or the name of the tool that must be called.
    `template_arguments`: extra variables for the model's chat template, such as {"enable_thinking": False}.
    """

    tools: Sequence[Mapping[str, Any]] = ()
    tool_choice: str | Mapping[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    template_arguments: Mapping[str, Any] = field(default_factory=dict)

    def fill(self, request: pb.ChatRequest) -> None:
        """Write the options into `request`. Raises InvalidArgument if a value cannot be represented."""
        request.tools.extend(_tool(i, tool) for i, tool in enumerate(self.tools))
        if self.tool_choice is not None:
            request.tool_choice.CopyFrom(_tool_choice(self.tool_choice))
        if self.parallel_tool_calls is not None:
            request.parallel_tool_calls = self.parallel_tool_calls
        if self.template_arguments:
            request.template_arguments_json = json_text("template_arguments", self.template_arguments)


def turns(messages: Sequence[Message] | str) -> list[pb.Message]:
    """Convert a conversation; a plain string is one user turn. Raises InvalidArgument for other types."""
    given: Sequence[Message] = [{"role": "user", "content": messages}] if isinstance(messages, str) else messages
    if not is_listing(given):
        raise InvalidArgument.field("messages", f"must be a text or a list of turns, not {type(given).__name__}")
    return [_turn(f"messages[{i}]", turn) for i, turn in enumerate(given)]


def assistant_turn(text: str, tool_calls: Sequence[ToolCall], reasoning: str = "") -> Message:
    """An output as the assistant turn that continues the conversation."""
    calls = [{"id": call.id, "name": call.name, "arguments": call.arguments} for call in tool_calls]
    return {"role": "assistant", "content": text, "tool_calls": calls, "reasoning": reasoning}


def json_text(field_name: str, value: Any) -> str:
    """`value` as JSON. Raises InvalidArgument if it is not serializable."""
    try:
        return json.dumps(value, ensure_ascii=False)
    except (TypeError, ValueError) as error:
        raise InvalidArgument.field(field_name, f"is no JSON: {error}") from None


def _turn(place: str, turn: Message) -> pb.Message:
    if not isinstance(turn, Mapping):
        raise InvalidArgument.field(place, 'must be {"role": ..., "content": ...}')
    if "role" not in turn:
        raise InvalidArgument.field(f"{place}.role", "is missing; say user, system, assistant or tool")
    calls = turn.get("tool_calls") or ()
    content = turn.get("content", "" if calls else None)
    texts: dict[str, Any] = {"role": turn.get("role"), "content": "" if content is None and calls else content}
    for name in ("name", "tool_call_id"):
        texts[name] = turn.get(name) or ""
    texts["reasoning"] = turn.get("reasoning") or turn.get("reasoning_content") or ""
    return pb.Message(
        **{name: valid_text(f"{place}.{name}", text) for name, text in texts.items()},
        tool_calls=[_call(f"{place}.tool_calls[{i}]", call) for i, call in enumerate(calls)],
    )


def _call(place: str, call: Any) -> pb.ToolCall:
    if isinstance(call, ToolCall):
        return pb.ToolCall(id=call.id, name=call.name, arguments=call.arguments)
    inner = _function(place, call)
    arguments = inner.get("arguments", "{}")
    text = arguments if isinstance(arguments, str) else json_text(f"{place}.arguments", arguments)
    return pb.ToolCall(
        id=valid_text(f"{place}.id", call.get("id", "")),
        name=valid_text(f"{place}.name", inner.get("name")),
        arguments=text,
    )


def _tool(i: int, tool: Any) -> pb.Tool:
    place = f"tools[{i}]"
    inner = _function(place, tool)
    parameters = inner.get("parameters")
    return pb.Tool(
        name=valid_text(f"{place}.name", inner.get("name")),
        description=valid_text(f"{place}.description", inner.get("description") or ""),
        parameters_json="" if parameters is None else json_text(f"{place}.parameters", parameters),
    )


def _function(place: str, given: Any) -> Mapping[str, Any]:
    """Unwrap OpenAI's {"type": "function", "function": {...}}; return a flat mapping as it is."""
    inner = given.get("function", given) if isinstance(given, Mapping) else None
    if not isinstance(inner, Mapping):
        raise InvalidArgument.field(place, 'must be {"name": ...} or {"type": "function", "function": {"name": ...}}')
    return inner


def _tool_choice(given: str | Mapping[str, Any]) -> pb.ToolChoice:
    if isinstance(given, str) and given in _MODES:
        return pb.ToolChoice(mode=_MODES[given])
    name = given if isinstance(given, str) else _function("tool_choice", given).get("name")
    if not isinstance(name, str) or not name:
        raise InvalidArgument.field("tool_choice", f"must be {_MODE_NAMES}")
    return pb.ToolChoice(name=name)
