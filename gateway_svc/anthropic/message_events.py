"""Build Anthropic's JSON from the events of a generation: events of a stream, or from those a whole message. Pure.

A block begins with its first text, so a stream has begun only once there is output. White space alone beside calls
or thinking is not a block: Anthropic's API accepts no such text in a later request.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from pydantic_core import from_json

from gateway_svc.anthropic.content_blocks import CALL_PREFIX
from gateway_svc.anthropic.thinking import signature_of
from gateway_svc.generating.generation import Event
from protos.common.v1 import common_pb2
from protos.inference.v1 import inference_pb2 as pb

Json = dict[str, Any]

_STOP_REASONS = {
    common_pb2.FINISH_REASON_STOP: "end_turn",
    common_pb2.FINISH_REASON_LENGTH: "max_tokens",
    common_pb2.FINISH_REASON_TOOL_CALLS: "tool_use",
}
_OPENAI_CALL = "call_"


@dataclass(slots=True)
class _OpenBlock:
    """Block under construction. `texts`: of thinking, for its signature."""

    kind: str
    index: int
    texts: list[str] = field(default_factory=list)


class MessageEvents:
    """Turns a generation's events into those of a stream: message_start, blocks one after the other, message_delta, message_stop.

    `head`: id and model. `fills_context`: max_tokens was reduced to what the context has room for.
    """

    def __init__(
        self, head: Json, *, num_prompt_tokens: int, fills_context: bool = False, omits_thinking: bool = False
    ) -> None:
        self._head = head
        self._num_prompt_tokens = num_prompt_tokens
        self._fills_context = fills_context
        self._omits_thinking = omits_thinking
        self._has_begun = False
        self._has_called = False
        self._num_blocks = 0
        self._open: _OpenBlock | None = None
        self._space = ""
        self._finished: pb.Finished | None = None

    def add(self, events: Sequence[Event]) -> list[Json]:
        """Events to send for new events of the generation."""
        made: list[Json] = []
        for event in events:
            match event:
                case pb.Delta():
                    made += self._text(event.text)
                case pb.ReasoningDelta():
                    made += self._thinking(event.text)
                case pb.ToolCallDelta():
                    made += self._call(event)
                case pb.Finished():
                    self._finished = event
                case pb.Usage():
                    made += self._end(event)
        return made

    # --- blocks ------------------------------------------------------------------------------------------------------

    def _text(self, text: str) -> list[Json]:
        if self._open is not None and self._open.kind == "text":
            return self._delta("text", text) if text else []
        self._space += text
        if not self._space.strip():
            return []
        text, self._space = self._space, ""
        return [*self._begin({"type": "text", "text": ""}), *self._delta("text", text)]

    def _thinking(self, text: str) -> list[Json]:
        if not text:
            return []
        made: list[Json] = []
        if self._open is None or self._open.kind != "thinking":
            made += self._begin({"type": "thinking", "thinking": "", "signature": ""})
        assert self._open is not None
        self._open.texts.append(text)
        return made if self._omits_thinking else [*made, *self._delta("thinking", text)]

    def _call(self, event: pb.ToolCallDelta) -> list[Json]:
        made: list[Json] = []
        if event.id or event.name:
            self._has_called = True
            call_id = CALL_PREFIX + event.id.removeprefix(_OPENAI_CALL)
            made += self._begin({"type": "tool_use", "id": call_id, "name": event.name, "input": {}})
        return [*made, *self._delta("input_json", event.arguments, "partial_json")] if event.arguments else made

    def _begin(self, block: Json) -> list[Json]:
        """Close the open block and open another."""
        made = [*self._message_start(), *self._close()]
        self._space = ""
        self._open = _OpenBlock(block["type"], self._num_blocks)
        self._num_blocks += 1
        return [*made, {"type": "content_block_start", "index": self._open.index, "content_block": block}]

    def _delta(self, kind: str, text: str, key: str | None = None) -> list[Json]:
        assert self._open is not None
        delta = {"type": f"{kind}_delta", key or kind: text}
        return [{"type": "content_block_delta", "index": self._open.index, "delta": delta}]

    def _close(self) -> list[Json]:
        if self._open is None:
            return []
        made: list[Json] = []
        if self._open.kind == "thinking":
            made += self._delta("signature", signature_of("".join(self._open.texts), carries=self._omits_thinking))
        made.append({"type": "content_block_stop", "index": self._open.index})
        self._open = None
        return made

    # --- message -----------------------------------------------------------------------------------------------------

    def _message_start(self) -> list[Json]:
        """First event. Cached tokens are known only at the end; until then all of the prompt's count as input."""
        if self._has_begun:
            return []
        self._has_begun = True
        usage = _usage(pb.Usage(prompt_tokens=self._num_prompt_tokens))
        message = {**self._head, "type": "message", "role": "assistant", "content": []}
        message |= {"stop_reason": None, "stop_sequence": None, "usage": {**usage, "service_tier": "standard"}}
        return [{"type": "message_start", "message": message}]

    def _end(self, usage: pb.Usage) -> list[Json]:
        """Last events, with the totals."""
        made = self._message_start()
        if self._space and not self._has_called:
            space = self._space
            made += [*self._begin({"type": "text", "text": ""}), *self._delta("text", space)]
        made += self._close()
        return [
            *made,
            {"type": "message_delta", "delta": self._stop(), "usage": _usage(usage)},
            {"type": "message_stop"},
        ]

    def _stop(self) -> Json:
        assert self._finished is not None
        reason, sequence = _STOP_REASONS[self._finished.reason], None
        if self._finished.WhichOneof("stop_match") == "stop_string":
            reason, sequence = "stop_sequence", self._finished.stop_string
        elif reason == "max_tokens" and self._fills_context:
            reason = "model_context_window_exceeded"
        return {"stop_reason": reason, "stop_sequence": sequence}


def _usage(usage: pb.Usage) -> Json:
    """Anthropic's usage: `input_tokens` are those not read from the cache. Writing to it costs nothing."""
    return {
        "input_tokens": usage.prompt_tokens - usage.cached_prompt_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.cached_prompt_tokens,
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"thinking_tokens": usage.reasoning_tokens},
    }


# --- whole -----------------------------------------------------------------------------------------------------------


def whole_message(events: Iterable[Json]) -> Json:
    """Message that the events of a complete stream add up to."""
    message: Json = {}
    pieces: list[list[str]] = []
    for event in events:
        match event["type"]:
            case "message_start":
                message = {**event["message"], "content": []}
            case "content_block_start":
                message["content"].append(dict(event["content_block"]))
                pieces.append([])
            case "content_block_delta":
                _add_delta(message["content"][event["index"]], pieces[event["index"]], event["delta"])
            case "message_delta":
                message |= event["delta"]
                message["usage"] = {**message["usage"], **event["usage"]}
    for block, texts in zip(message["content"], pieces, strict=True):
        _fill(block, "".join(texts))
    return message


def _add_delta(block: Json, texts: list[str], delta: Json) -> None:
    if delta["type"] == "signature_delta":
        block["signature"] = delta["signature"]
    else:
        texts.append(delta["partial_json" if block["type"] == "tool_use" else block["type"]])


def _fill(block: Json, text: str) -> None:
    if block["type"] == "tool_use":
        block["input"] = _input_of(text)
    else:
        block[block["type"]] = text


def _input_of(text: str) -> Json:
    """Input of a call; of a truncated one the complete part, as Anthropic's packages read it from a stream.

    Text that is no JSON object is wrapped as in Anthropic's guide to fine-grained tool streaming.
    """
    try:
        given = from_json(text or "{}", allow_partial=True)
    except ValueError:
        given = None
    return given if isinstance(given, dict) else {"INVALID_JSON": text}
