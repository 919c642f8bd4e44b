"""Convert messages with content blocks to messages of a ChatRequest. Pure. Text only: images and documents are refused by name.

Texts of one message are paragraphs: they are joined by a line break. Adjacent messages of one role are one turn.
"""

from collections.abc import Sequence
from typing import Annotated, Any, Literal, NoReturn, TypeVar

from pydantic import BaseModel, ConfigDict, Discriminator, Field, Tag

from gateway_svc.anthropic.thinking import thinking_text
from gateway_svc.http.json_body import BLOCKS_TAG, json_text, refuse
from protos.inference.v1 import inference_pb2 as pb

MAX_BLOCKS = 4096
CALL_PREFIX = "toolu_"
_FAILED = "Error: "
_SUPPORTED = frozenset({"text", "thinking", "redacted_thinking", "tool_use", "tool_result"})
_OTHERS = frozenset(
    {
        "image",
        "document",
        "search_result",
        "server_tool_use",
        "web_search_tool_result",
        "container_upload",
        "tool_reference",
    }
)

T = TypeVar("T")


class TextBlock(BaseModel):
    """A block of a system prompt."""

    model_config = ConfigDict(strict=True)

    type: Literal["text"]
    text: str


class ContentBlock(BaseModel):
    """A block of any type; which fields it needs depends on the type. `cache_control` has no effect."""

    model_config = ConfigDict(strict=True)

    type: str
    text: str | None = None
    thinking: str | None = None
    signature: str | None = None
    id: str | None = None
    name: str | None = None
    input: dict[str, Any] | None = None
    tool_use_id: str | None = None
    content: Any = None
    is_error: bool | None = None


SystemPrompt = str | Annotated[list[TextBlock], Field(fail_fast=True, max_length=MAX_BLOCKS)]
Blocks = Annotated[list[ContentBlock], Field(fail_fast=True, max_length=MAX_BLOCKS)]
Content = Annotated[
    Annotated[str, Tag("text")] | Annotated[Blocks, Tag(BLOCKS_TAG)],
    Discriminator(lambda given: "text" if isinstance(given, str) else BLOCKS_TAG),
]


class MessageTurn(BaseModel):
    """One message."""

    model_config = ConfigDict(strict=True)

    role: Literal["user", "assistant", "system"]
    content: Content


def add_turns(request: pb.ChatRequest, system: SystemPrompt | None, turns: Sequence[MessageTurn]) -> None:
    """Add the system prompt and all messages.

    If the last is the assistant's, the answer continues it. Raises InvalidArgument naming the block that is not
    supported: `messages[i].content[k]`.
    """
    if system:
        text = system if isinstance(system, str) else "\n".join(block.text for block in system)
        request.messages.add(role="system", content=text)
    for i, turn in enumerate(turns):
        where = f"messages[{i}].content"
        if isinstance(turn.content, str):
            _add_text(_turn(request, turn.role), turn.content)
        else:
            for k, block in enumerate(turn.content):
                _add_block(request, turn.role, block, f"{where}[{k}]")
    if turns and turns[-1].role == "assistant":
        if request.messages[-1].tool_calls:
            refuse(f"messages[{len(turns) - 1}]", "ends with tool_use; send a tool_result for each call")
        request.continue_final_message = True


def _turn(request: pb.ChatRequest, role: str) -> pb.Message:
    """Return the message to add to: the last one if it has that role."""
    last = request.messages[-1] if request.messages else None
    return last if last is not None and last.role == role != "system" else request.messages.add(role=role)


def _add_text(message: pb.Message, text: str) -> None:
    message.content += f"\n{text}" if message.content else text


def _add_block(request: pb.ChatRequest, role: str, block: ContentBlock, where: str) -> None:
    match role, block.type:
        case _, "text":
            _add_text(_turn(request, role), _needed(block.text, f"{where}.text"))
        case "assistant", "thinking":
            text = thinking_text(_needed(block.thinking, f"{where}.thinking"), block.signature or "")
            _turn(request, role).reasoning += text
        case "assistant", "redacted_thinking":
            _turn(request, role)  # Only the server that encrypted it can read it.
        case "assistant", "tool_use":
            _add_call(_turn(request, role), block, where)
        case "user", "tool_result":
            _add_result(request, block, where)
        case _:
            _refuse_block(role, block.type, where)


def _add_call(message: pb.Message, block: ContentBlock, where: str) -> None:
    call_id, name = _needed(block.id, f"{where}.id"), _needed(block.name or None, f"{where}.name")
    arguments = json_text(_needed(block.input, f"{where}.input"), f"{where}.input")
    message.tool_calls.add(id=call_id.removeprefix(CALL_PREFIX), name=name, arguments=arguments)


def _add_result(request: pb.ChatRequest, block: ContentBlock, where: str) -> None:
    """Add a tool's message. Templates have no place for `is_error`, so the text begins with the word."""
    call_id = _needed(block.tool_use_id, f"{where}.tool_use_id")
    text = _result_text(block.content, f"{where}.content")
    request.messages.add(
        role="tool",
        content=_FAILED + text if block.is_error else text,
        tool_call_id=call_id.removeprefix(CALL_PREFIX),
    )


def _result_text(content: Any, where: str) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, list):
        refuse(where, "must be a text or a list of text blocks")
    return "\n".join(_result_part(part, f"{where}[{k}]") for k, part in enumerate(content))


def _result_part(part: Any, where: str) -> str:
    match part:
        case {"type": "text", "text": str() as text}:
            return text
        case {"type": str() as kind}:
            _refuse_block("tool_result", kind, where)
    refuse(where, "must be a text block")


def _needed(value: T | None, field: str) -> T:
    if value is None:
        refuse(field, "is missing")
    return value


def _refuse_block(role: str, kind: str, where: str) -> NoReturn:
    if kind in _SUPPORTED:
        refuse(where, f"is of type {kind}, which a message of role {role} cannot have")
    named = f"of type {kind}" if kind in _OTHERS else "of an unknown type"
    refuse(where, f"is {named}; this server takes text, thinking, tool_use and tool_result")
