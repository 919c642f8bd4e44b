"""Build a response and its stream events from events of a generation. Pure."""

from gateway_svc.generating.generation import Event
from gateway_svc.openai.answers.outputs import OutputEvent
from gateway_svc.openai.responses.output_items import (
    COMPLETED,
    IN_PROGRESS,
    INCOMPLETE,
    ItemOptions,
    Json,
    MessageItem,
    OutputItem,
    is_silent,
    new_item,
)
from protos.common.v1 import common_pb2
from protos.inference.v1 import inference_pb2 as pb
from svc_common.errors import QuireError

FAILED, CANCELLED = "failed", "cancelled"
_INCOMPLETE_REASONS = {
    common_pb2.FINISH_REASON_LENGTH: "max_output_tokens",
    common_pb2.FINISH_REASON_DEADLINE: "deadline",
}


class ResponseAnswer:
    """One response. `head`: its fields that do not change; others are overridden.

    The events of a stream are, in order: `events` of each list of the generation, then `last_events` after
    `complete`, or after `fail`.
    """

    def __init__(self, head: Json, request_id: str, options: ItemOptions) -> None:
        self._head = head
        self._request_id = request_id
        self._options = options
        self._usage: pb.Usage | None = None
        self._items: list[OutputItem] = []
        self._is_open = False
        self._num_events = 0
        self._status = IN_PROGRESS
        self._completed_at: int | None = None
        self._reason: str | None = None
        self._error: Json | None = None

    def events(self, events: list[Event]) -> list[Json]:
        """Add new events of the generation; returns the events to send. The first ones come with the first output."""
        made: list[Json] = []
        for event in events:
            if isinstance(event, pb.Usage):
                self._usage = event
            elif isinstance(event, pb.Finished):
                made += self._finished(event)
            elif isinstance(event, OutputEvent) and not is_silent(event):
                made += self._added(event)
        return [*self._opening(), *self._numbered(made)] if made else []

    def complete(self, completed_at: int) -> None:
        """End the response at `completed_at`, Unix time in seconds."""
        self._status = COMPLETED if self._reason is None else INCOMPLETE
        self._completed_at = completed_at if self._reason is None else None

    def fail(self, error: QuireError) -> None:
        """End the response with an error, or as cancelled."""
        self._status = CANCELLED if error.status == "CANCELLED" else FAILED
        if self._status == FAILED:
            code = "rate_limit_exceeded" if error.status == "RESOURCE_EXHAUSTED" else "server_error"
            self._error = {"code": code, "message": error.message}
        if self._items and self._items[-1].status == IN_PROGRESS:
            self._items[-1].status = INCOMPLETE

    @property
    def is_cancelled(self) -> bool:
        """True if it ended as cancelled."""
        return self._status == CANCELLED

    def last_events(self) -> list[Json]:
        """Last events, of a response that has ended."""
        opening = self._opening()
        kind = FAILED if self._status == CANCELLED else self._status
        return [*opening, *self._numbered([{"type": f"response.{kind}", "response": self.response()}])]

    def mark_unstored(self) -> None:
        """Tell that the response could not be stored."""
        self._head = {**self._head, "store": False}

    def response(self) -> Json:
        """The response so far."""
        return {
            **self._head,
            "status": self._status,
            "completed_at": self._completed_at,
            "error": self._error,
            "incomplete_details": None if self._reason is None else {"reason": self._reason},
            "output": [item.json() for item in self._items],
            "usage": None if self._usage is None else _usage(self._usage),
        }

    def _opening(self) -> list[Json]:
        """First events, once. Until they are sent an error can still set the HTTP status."""
        if self._is_open:
            return []
        self._is_open = True
        begun = {**self._head, "status": IN_PROGRESS, "completed_at": None, "error": None, "incomplete_details": None}
        begun |= {"output": [], "usage": None}
        return self._numbered([{"type": f"response.{kind}", "response": begun} for kind in ("created", IN_PROGRESS)])

    def _numbered(self, events: list[Json]) -> list[Json]:
        first = self._num_events
        self._num_events += len(events)
        return [{**event, "sequence_number": number} for number, event in enumerate(events, first)]

    def _added(self, event: OutputEvent) -> list[Json]:
        if self._items and self._items[-1].takes(event):
            return self._items[-1].added(event)
        closed = self._items[-1].closed(COMPLETED) if self._items else []
        item = new_item(event, self._request_id, len(self._items), self._options)
        self._items.append(item)
        return [*closed, *item.opened(), *item.added(event)]

    def _finished(self, finished: pb.Finished) -> list[Json]:
        """Close the last item. An output without text is an empty message."""
        self._reason = _INCOMPLETE_REASONS.get(finished.reason)
        opened: list[Json] = []
        if not self._items:
            self._items.append(MessageItem(self._request_id, 0, self._options))
            opened = self._items[0].opened()
        return [*opened, *self._items[-1].closed(COMPLETED if self._reason is None else INCOMPLETE)]


def _usage(usage: pb.Usage) -> Json:
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_prompt_tokens, "cache_write_tokens": 0},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }
