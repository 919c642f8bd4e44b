"""Convert messages of OpenAI's JSON. Pure. Text only: images, audio and files are refused by name."""

from typing import Annotated, Any, Literal, NoReturn

from pydantic import BaseModel, ConfigDict, Field

from gateway_svc.http.json_body import refuse
from protos.inference.v1 import inference_pb2 as pb

MAX_MESSAGES = 4096
MAX_PARTS = 4096
MAX_CALLS = 128
_KNOWN_PARTS = frozenset({"image_url", "input_image", "input_audio", "audio_url", "video_url", "file"})


class _ContentPart(BaseModel):
    model_config = ConfigDict(strict=True)

    type: str
    text: str | None = None
    refusal: str | None = None


class _FunctionCall(BaseModel):
    model_config = ConfigDict(strict=True)

    name: str
    arguments: str = ""


class _ToolCall(BaseModel):
    model_config = ConfigDict(strict=True)

    id: str = ""
    type: Literal["function"] = "function"
    function: _FunctionCall


class ChatMessage(BaseModel):
    """One message. Earlier reasoning is in `reasoning_content`, or `reasoning`, vLLM's newer name."""

    model_config = ConfigDict(strict=True, extra="ignore")

    role: str
    content: str | Annotated[list[_ContentPart], Field(fail_fast=True, max_length=MAX_PARTS)] | None = None
    name: str | None = None
    tool_calls: Annotated[list[_ToolCall], Field(fail_fast=True, max_length=MAX_CALLS)] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    refusal: str | None = None
    function_call: Any = None
    audio: Any = None


def add_message(request: pb.ChatRequest, i: int, message: ChatMessage) -> None:
    """Add message `i`. Raises InvalidArgument naming `messages[i]` if it is empty or not text."""
    if message.audio:
        refuse(f"messages[{i}].audio", "is not supported by this server: only text is")
    if message.function_call:
        refuse(f"messages[{i}].function_call", "is OpenAI's old way; send tool_calls")
    added = request.messages.add(
        role=message.role,
        content=_content(i, message),
        name=message.name or "",
        tool_call_id=message.tool_call_id or "",
        reasoning=message.reasoning_content or message.reasoning or "",
    )
    for call in message.tool_calls or []:
        added.tool_calls.add(id=call.id, name=call.function.name, arguments=call.function.arguments)


def _content(i: int, message: ChatMessage) -> str:
    if message.content is None:
        return _without_content(i, message)
    if isinstance(message.content, str):
        return message.content
    return "".join(_text(i, k, part) for k, part in enumerate(message.content))


def _without_content(i: int, message: ChatMessage) -> str:
    if not (message.tool_calls or message.refusal or message.reasoning_content or message.reasoning):
        refuse(f"messages[{i}].content", "is missing")
    return message.refusal or ""


def _text(i: int, k: int, part: _ContentPart) -> str:
    text = {"text": part.text, "refusal": part.refusal}.get(part.type)
    if text is None:
        _refuse_part(i, k, part)
    return text


def _refuse_part(i: int, k: int, part: _ContentPart) -> NoReturn:
    where = f"messages[{i}].content[{k}]"
    if part.type in ("text", "refusal"):
        refuse(f"{where}.{part.type}", "is missing")
    kind = f"of type {part.type}" if part.type in _KNOWN_PARTS else "of an unknown type"
    refuse(where, f"is {kind}; this server takes text only")
