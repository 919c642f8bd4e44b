"""State of an answer under construction: each choice, and its prompt. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from gateway_svc.generating.generation import Event
from protos.inference.v1 import inference_pb2 as pb

Json = dict[str, Any]
OutputEvent = pb.Delta | pb.ReasoningDelta | pb.ToolCallDelta


@dataclass(slots=True)
class Output:
    """One choice. `entries`, `offsets`: logprobs not sent yet, with their tokens' positions in the text.

    `num_chars`: length of the text so far, with an echoed prompt. `is_open`: its first chunk was sent.
    """

    texts: list[str] = field(default_factory=list)
    reasoning: list[str] = field(default_factory=list)
    calls: list[Json] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    num_tokens: int = 0
    num_chars: int = 0
    entries: list[Json] = field(default_factory=list)
    offsets: list[int] = field(default_factory=list)
    finished: pb.Finished | None = None
    is_open: bool = False

    @property
    def text(self) -> str:
        """Whole text."""
        return "".join(self.texts)

    def add(self, event: OutputEvent) -> None:
        """Add an event's output."""
        self.token_ids += event.token_ids
        match event:
            case pb.Delta():
                self.texts.append(event.text)
            case pb.ReasoningDelta():
                self.reasoning.append(event.text)
            case pb.ToolCallDelta():
                self._add_call(event)

    def _add_call(self, event: pb.ToolCallDelta) -> None:
        if event.index == len(self.calls):
            function = {"name": event.name, "arguments": ""}
            self.calls.append({"id": event.id, "type": "function", "function": function})
        self.calls[event.index]["function"]["arguments"] += event.arguments


@dataclass(slots=True)
class Prompt:
    """One prompt with results of its generation. `token_ids`, `text`: set if the answer shows them, else empty."""

    num_tokens: int
    token_ids: Sequence[int] = ()
    text: str = ""
    awaits_logprobs: bool = False
    usage: pb.Usage | None = None
    logprobs: pb.PromptLogprobs | None = None
    _held: list[Event] = field(default_factory=list)

    @property
    def known_logprobs(self) -> pb.PromptLogprobs:
        """Logprobs of the prompt; empty for a prompt of one token."""
        return self.logprobs or pb.PromptLogprobs()

    def in_order(self, events: list[Event]) -> list[Event]:
        """Return the output events that can be sent now.

        There are none before the prompt's logprobs if the answer begins with them.
        """
        for event in events:
            if isinstance(event, pb.Usage):
                self.usage = event
            elif isinstance(event, pb.PromptLogprobs):
                self.logprobs = event
            elif not isinstance(event, pb.Started):
                self._held.append(event)
        if self.awaits_logprobs and self.logprobs is None and self.usage is None:
            return []
        ready, self._held = self._held, []
        return ready
