"""Conversations as prompts of `LLM.chat`: one or many, each with its chat options. Pure."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from quire.client.chat_messages import ChatOptions, Message
from quire.client.value_checks import is_listing
from svc_common.errors import InvalidArgument


@dataclass(frozen=True, slots=True)
class Conversation:
    """Turns to answer, oldest first; a plain string is one user turn."""

    messages: Sequence[Message] | str
    chat: ChatOptions


def conversation_list(
    messages: str | Sequence[Message] | Sequence[Sequence[Message] | str], chat: ChatOptions
) -> list[Conversation]:
    """One conversation, or a list of them. Raises InvalidArgument for other types."""
    if isinstance(messages, str):
        return [Conversation(messages, chat)]
    if not is_listing(messages):
        what = type(messages).__name__
        raise InvalidArgument.field("messages", f"must be a conversation or a list of them, not {what}")
    given = list(messages)
    if given and isinstance(given[0], Mapping):
        return [Conversation(given, chat)]  # type: ignore[arg-type]
    return [Conversation(one, chat) for one in given]  # type: ignore[arg-type]
