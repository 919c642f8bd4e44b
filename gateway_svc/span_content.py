"""Prompts and outputs in the form of OpenTelemetry's GenAI conventions, for spans with `--trace-content`.

Without that option no span has content.
"""

import json
from dataclasses import dataclass, field
from typing import Any

from gateway_svc.checks.validation import AnyRequest
from gateway_svc.generating.generation import Event
from protos.common.v1 import common_pb2
from protos.inference.v1 import inference_pb2 as pb

MAX_CHARS = 16_384
"""Limit per text; longer texts are truncated."""


def input_messages(request: AnyRequest) -> str:
    """JSON of `gen_ai.input.messages`."""
    if isinstance(request, pb.ChatRequest):
        return json.dumps([_message(message) for message in request.messages])
    if request.WhichOneof("prompt") == "token_ids":
        return json.dumps([{"role": "user", "parts": [{"type": "token_ids", "content": list(request.token_ids.ids)}]}])
    return json.dumps([{"role": "user", "parts": [_text("text", request.text)]}])


def stop_sequences(request: AnyRequest) -> list[str]:
    """Stop strings of a request."""
    return list(request.stop.stop_strings)


def finish_reason(finished: pb.Finished) -> str:
    """Finish reason in the form of the conventions."""
    return common_pb2.FinishReason.Name(finished.reason).removeprefix("FINISH_REASON_").lower()


@dataclass(slots=True)
class _Output:
    """Output of one choice."""

    texts: dict[str, str] = field(default_factory=dict)
    calls: dict[int, pb.ToolCall] = field(default_factory=dict)
    finish_reason: str = ""

    def add(self, kind: str, text: str) -> None:
        """Append text, up to the limit."""
        known = self.texts.get(kind, "")
        if len(known) < MAX_CHARS:
            self.texts[kind] = (known + text)[:MAX_CHARS]

    def message(self) -> dict[str, Any]:
        """The choice as an assistant message."""
        parts = [{"type": kind, "content": text} for kind, text in self.texts.items() if text]
        parts += [_call(call) for call in self.calls.values()]
        return {"role": "assistant", "parts": parts, "finish_reason": self.finish_reason}


class OutputContent:
    """Output of a generation so far."""

    def __init__(self) -> None:
        self._choices: dict[int, _Output] = {}

    def take(self, events: list[Event]) -> None:
        """Append new events."""
        for event in events:
            match event:
                case pb.Delta():
                    self._choice(event.choice).add("text", event.text)
                case pb.ReasoningDelta():
                    self._choice(event.choice).add("reasoning", event.text)
                case pb.ToolCallDelta():
                    calls = self._choice(event.choice).calls
                    call = calls.setdefault(event.index, pb.ToolCall(id=event.id, name=event.name))
                    call.arguments = (call.arguments + event.arguments)[:MAX_CHARS]
                case pb.Finished():
                    self._choice(event.choice).finish_reason = finish_reason(event)

    def _choice(self, number: int) -> _Output:
        return self._choices.setdefault(number, _Output())

    def messages(self) -> str:
        """JSON of `gen_ai.output.messages`."""
        return json.dumps([choice.message() for _, choice in sorted(self._choices.items())])


def _message(message: pb.Message) -> dict[str, Any]:
    parts = [_text(kind, text) for kind, text in (("reasoning", message.reasoning), ("text", message.content)) if text]
    if message.tool_call_id:
        parts = [{"type": "tool_call_response", "id": message.tool_call_id, "response": message.content[:MAX_CHARS]}]
    return {"role": message.role, "parts": [*parts, *map(_call, message.tool_calls)]}


def _text(kind: str, text: str) -> dict[str, Any]:
    return {"type": kind, "content": text[:MAX_CHARS]}


def _call(call: pb.ToolCall) -> dict[str, Any]:
    return {"type": "tool_call", "id": call.id, "name": call.name, "arguments": call.arguments[:MAX_CHARS]}
