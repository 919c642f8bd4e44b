"""Items of a response's output under construction: their JSON, and their events in a stream. Pure.

Events have no `sequence_number` yet; `ResponseAnswer` numbers them.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

from gateway_svc.openai.answers.outputs import OutputEvent
from gateway_svc.openai.answers.token_entries import TokenEntries
from gateway_svc.openai.responses.carried_reasoning import carried
from protos.inference.v1 import inference_pb2 as pb

Json = dict[str, Any]

IN_PROGRESS, COMPLETED, INCOMPLETE = "in_progress", "completed", "incomplete"


@dataclass(frozen=True, slots=True)
class ItemOptions:
    """What items show. `summarized`: reasoning is in the item's summary, not in its content.

    `carries_reasoning`: reasoning items have `encrypted_content`. `entries`: makes log probabilities.
    """

    entries: TokenEntries
    summarized: bool = False
    carries_reasoning: bool = False


class OutputItem(ABC):
    """One item. `index`: its place in the output."""

    prefix: str

    def __init__(self, request_id: str, index: int, options: ItemOptions) -> None:
        self.id = f"{self.prefix}_{request_id}_{index}"
        self.status = IN_PROGRESS
        self._index = index
        self._options = options

    @abstractmethod
    def takes(self, event: OutputEvent) -> bool:
        """True if the event belongs to this item, false if it begins another."""

    @abstractmethod
    def json(self) -> Json:
        """The item so far."""

    def opened(self) -> list[Json]:
        """Events of its beginning."""
        return [{"type": "response.output_item.added", "output_index": self._index, "item": self.json()}]

    @abstractmethod
    def added(self, event: OutputEvent) -> list[Json]:
        """Add an event's output; returns its events."""

    def closed(self, status: str) -> list[Json]:
        """End with `status`; returns the events of the end."""
        self.status = status
        return [{"type": "response.output_item.done", "output_index": self._index, "item": self.json()}]

    def _event(self, kind: str, **fields: Any) -> Json:
        return {"type": f"response.{kind}", "item_id": self.id, "output_index": self._index, **fields}


class _TextItem(OutputItem):
    """Item with one part that is text, and absent before it is announced."""

    def __init__(self, request_id: str, index: int, options: ItemOptions) -> None:
        super().__init__(request_id, index, options)
        self._texts: list[str] = []
        self._has_part = False

    @property
    def _text(self) -> str:
        return "".join(self._texts)

    @abstractmethod
    def _part(self) -> Json:
        """The part so far."""

    @property
    def _parts(self) -> list[Json]:
        return [self._part()] if self._has_part else []


class MessageItem(_TextItem):
    """The model's text."""

    prefix = "msg"

    def __init__(self, request_id: str, index: int, options: ItemOptions) -> None:
        super().__init__(request_id, index, options)
        self._logprobs: list[Json] = []

    def takes(self, event: OutputEvent) -> bool:
        """True for text."""
        return isinstance(event, pb.Delta)

    def json(self) -> Json:
        """The item so far."""
        return {
            "id": self.id,
            "type": "message",
            "status": self.status,
            "role": "assistant",
            "content": self._parts,
        }

    def opened(self) -> list[Json]:
        """Events of its beginning."""
        events = super().opened()
        self._has_part = True
        return [*events, self._event("content_part.added", content_index=0, part=self._part())]

    def added(self, event: OutputEvent) -> list[Json]:
        """Add text."""
        assert isinstance(event, pb.Delta)
        entries = (
            self._options.entries.of(event.token_ids, event.logprobs, event.top_logprobs) if event.logprobs else []
        )
        self._texts.append(event.text)
        self._logprobs += entries
        return [self._event("output_text.delta", content_index=0, delta=event.text, logprobs=entries)]

    def closed(self, status: str) -> list[Json]:
        """Events of its end."""
        return [
            self._event("output_text.done", content_index=0, text=self._text, logprobs=self._logprobs),
            self._event("content_part.done", content_index=0, part=self._part()),
            *super().closed(status),
        ]

    def _part(self) -> Json:
        return {"type": "output_text", "text": self._text, "annotations": [], "logprobs": self._logprobs[:]}


class ReasoningItem(_TextItem):
    """The model's reasoning, in `content`, or in `summary` if a summary was asked for."""

    prefix = "rs"

    def takes(self, event: OutputEvent) -> bool:
        """True for reasoning."""
        return isinstance(event, pb.ReasoningDelta)

    def json(self) -> Json:
        """The item so far."""
        made: Json = {"id": self.id, "type": "reasoning", "status": self.status, "summary": []}
        made["summary" if self._options.summarized else "content"] = self._parts
        if self._options.carries_reasoning:
            made["encrypted_content"] = None if self.status == IN_PROGRESS else carried(self._text)
        return made

    def opened(self) -> list[Json]:
        """Events of its beginning."""
        events = super().opened()
        self._has_part = True
        kind = "reasoning_summary_part" if self._options.summarized else "content_part"
        return [*events, self._event(f"{kind}.added", **self._place, part=self._part())]

    def added(self, event: OutputEvent) -> list[Json]:
        """Add reasoning."""
        assert isinstance(event, pb.ReasoningDelta)
        self._texts.append(event.text)
        return [self._event(f"{self._kind}.delta", **self._place, delta=event.text)]

    def closed(self, status: str) -> list[Json]:
        """Events of its end."""
        kind = "reasoning_summary_part" if self._options.summarized else "content_part"
        return [
            self._event(f"{self._kind}.done", **self._place, text=self._text),
            self._event(f"{kind}.done", **self._place, part=self._part()),
            *super().closed(status),
        ]

    @property
    def _kind(self) -> str:
        return "reasoning_summary_text" if self._options.summarized else "reasoning_text"

    @property
    def _place(self) -> Json:
        return {"summary_index": 0} if self._options.summarized else {"content_index": 0}

    def _part(self) -> Json:
        return {"type": "summary_text" if self._options.summarized else "reasoning_text", "text": self._text}


class CallItem(OutputItem):
    """A call of a function. `first`: the event that began it."""

    prefix = "fc"

    def __init__(self, request_id: str, index: int, options: ItemOptions, first: pb.ToolCallDelta) -> None:
        super().__init__(request_id, index, options)
        self._call = first.index
        self._call_id = first.id
        self._name = first.name
        self._arguments: list[str] = []

    def takes(self, event: OutputEvent) -> bool:
        """True for more of the same call."""
        return isinstance(event, pb.ToolCallDelta) and event.index == self._call

    def json(self) -> Json:
        """The item so far."""
        return {
            "id": self.id,
            "type": "function_call",
            "status": self.status,
            "call_id": self._call_id,
            "name": self._name,
            "arguments": "".join(self._arguments),
        }

    def added(self, event: OutputEvent) -> list[Json]:
        """Add arguments."""
        assert isinstance(event, pb.ToolCallDelta)
        if not event.arguments:
            return []
        self._arguments.append(event.arguments)
        return [self._event("function_call_arguments.delta", delta=event.arguments)]

    def closed(self, status: str) -> list[Json]:
        """Events of its end."""
        done = self._event("function_call_arguments.done", name=self._name, arguments="".join(self._arguments))
        return [done, *super().closed(status)]


def new_item(event: OutputEvent, request_id: str, index: int, options: ItemOptions) -> OutputItem:
    """Make the item that the event begins."""
    if isinstance(event, pb.ToolCallDelta):
        return CallItem(request_id, index, options, event)
    return (ReasoningItem if isinstance(event, pb.ReasoningDelta) else MessageItem)(request_id, index, options)


def is_silent(event: OutputEvent) -> bool:
    """True if the event has nothing to show: a token without text, such as a mark."""
    return not isinstance(event, pb.ToolCallDelta) and not event.text
