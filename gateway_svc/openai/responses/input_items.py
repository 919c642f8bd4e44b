"""Convert input items of the Responses API to messages of a chat. Pure. Text only: images and files are refused by name."""

from collections.abc import Callable, Sequence
from typing import Annotated, Any, NoReturn, TypeVar

import pydantic
from pydantic import BaseModel, ConfigDict, Field

from gateway_svc.http.json_body import refuse
from gateway_svc.openai.requests.chat_messages import MAX_CALLS, MAX_PARTS
from gateway_svc.openai.responses.carried_reasoning import carried_text
from protos.inference.v1 import inference_pb2 as pb
from svc_common.errors import FieldViolation, InvalidArgument

Json = dict[str, Any]

_ASSISTANT = "assistant"
_TEXT_PARTS = {"input_text", "output_text", "text", "reasoning_text", "summary_text"}
_OTHER_PARTS = {"input_image", "input_file", "input_audio", "computer_screenshot"}
_OTHER_ITEMS = {
    *("additional_tools", "apply_patch_call", "apply_patch_call_output", "code_interpreter_call", "compaction"),
    *("computer_call", "computer_call_output", "custom_tool_call", "custom_tool_call_output", "file_search_call"),
    *("image_generation_call", "local_shell_call", "local_shell_call_output", "mcp_approval_request"),
    *("mcp_approval_response", "mcp_call", "mcp_list_tools", "shell_call", "shell_call_output", "tool_search_call"),
    *("tool_search_output", "web_search_call"),
}

M = TypeVar("M", bound=BaseModel)


class _Part(BaseModel):
    model_config = ConfigDict(strict=True)

    type: str
    text: str | None = None
    refusal: str | None = None


_Parts = Annotated[list[_Part], Field(fail_fast=True, max_length=MAX_PARTS)]


class _Message(BaseModel):
    model_config = ConfigDict(strict=True)

    role: str
    content: str | _Parts


class _Call(BaseModel):
    model_config = ConfigDict(strict=True)

    call_id: str
    name: str
    arguments: str


class _CallOutput(BaseModel):
    model_config = ConfigDict(strict=True)

    call_id: str
    output: str | _Parts


class _Reasoning(BaseModel):
    model_config = ConfigDict(strict=True)

    summary: _Parts = []
    content: _Parts | None = None
    encrypted_content: str | None = None


def kind_of(item: Json) -> str:
    """Type of an item; one with a role and without a type is a message."""
    return str(item.get("type") or ("message" if "role" in item else ""))


def add_items(request: pb.ChatRequest, items: Sequence[Json]) -> None:
    """Add the messages that the items form. Raises InvalidArgument naming `input[i]` of an unsupported or malformed item.

    Reasoning, an answer and calls in a row are one message of the assistant, as chat templates expect.
    """
    for i, item in enumerate(items):
        where = f"input[{i}]"
        match kind_of(item):
            case "message":
                _add_message(request, where, _parsed(_Message, where, item))
            case "reasoning":
                _turn(request, is_new=_has_output).reasoning += _reasoning(where, _parsed(_Reasoning, where, item))
            case "function_call":
                _add_call(request, where, _parsed(_Call, where, item))
            case "function_call_output":
                output = _parsed(_CallOutput, where, item)
                text = _text(f"{where}.output", output.output)
                request.messages.add(role="tool", content=text, tool_call_id=output.call_id)
            case kind:
                named = f"of type {kind}" if kind in _OTHER_ITEMS else "of an unknown type"
                refuse(where, f"is {named}; this server takes message, reasoning, function_call, function_call_output")


def _add_message(request: pb.ChatRequest, where: str, message: _Message) -> None:
    text = _text(f"{where}.content", message.content)
    if message.role == _ASSISTANT:
        _turn(request, is_new=_has_output).content = text
    else:
        request.messages.add(role=message.role, content=text)


def _add_call(request: pb.ChatRequest, where: str, call: _Call) -> None:
    turn = _turn(request, is_new=lambda _: False)
    if len(turn.tool_calls) == MAX_CALLS:
        refuse(where, f"is more than the {MAX_CALLS}th call in a row")
    turn.tool_calls.add(id=call.call_id, name=call.name, arguments=call.arguments)


def _turn(request: pb.ChatRequest, *, is_new: Callable[[pb.Message], bool]) -> pb.Message:
    """The assistant's message at the end of the conversation; a new one if there is none or `is_new(it)`."""
    last = request.messages[-1] if request.messages else None
    if last is None or last.role != _ASSISTANT or is_new(last):
        return request.messages.add(role=_ASSISTANT)
    return last


def _has_output(turn: pb.Message) -> bool:
    return bool(turn.content or turn.tool_calls)


def _reasoning(where: str, item: _Reasoning) -> str:
    """The reasoning's text: the item's content, else what the server had it carry, else its summary."""
    if item.content:
        return _text(f"{where}.content", item.content)
    if item.encrypted_content:
        return carried_text(item.encrypted_content, f"{where}.encrypted_content")
    return _text(f"{where}.summary", item.summary)


def _text(where: str, content: str | list[_Part]) -> str:
    if isinstance(content, str):
        return content
    return "".join(_part_text(f"{where}[{k}]", part) for k, part in enumerate(content))


def _part_text(where: str, part: _Part) -> str:
    text = part.refusal if part.type == "refusal" else part.text
    if part.type not in _TEXT_PARTS and part.type != "refusal":
        _refuse_part(where, part)
    if text is None:
        refuse(f"{where}.text", "is missing")
    return text


def _refuse_part(where: str, part: _Part) -> NoReturn:
    kind = f"of type {part.type}" if part.type in _OTHER_PARTS else "of an unknown type"
    refuse(where, f"is {kind}; this server takes text only")


def _parsed(cls: type[M], where: str, item: Json) -> M:
    try:
        return cls.model_validate(item)
    except pydantic.ValidationError as error:
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        field = f"{where}.{first['loc'][0]}"
        message = first["msg"]
    raise InvalidArgument(f"{field}: {message}", reason="INVALID_FIELD", violations=[FieldViolation(field, message)])
