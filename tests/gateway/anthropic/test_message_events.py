"""Events of a stream, checked by rules written from Anthropic's documentation, and the message they add up to. Pure."""

import json
import random
from dataclasses import dataclass, field
from typing import Any

import jsonschema
import pytest

from gateway_svc.anthropic.message_events import MessageEvents, whole_message
from gateway_svc.anthropic.thinking import thinking_text
from protos.common.v1 import common_pb2
from protos.inference.v1 import inference_pb2 as pb

HEAD = {"id": "msg_1", "model": "tiny"}
STOP, LENGTH = common_pb2.FINISH_REASON_STOP, common_pb2.FINISH_REASON_LENGTH
CALLS = common_pb2.FINISH_REASON_TOOL_CALLS

# --- Anthropic's documented stream -----------------------------------------------------------------------------------


def record(**properties: Any) -> dict[str, Any]:
    """Schema of an object that has exactly these properties."""
    return {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}


NUMBER = {"type": "integer", "minimum": 0}
TEXT = {"type": "string"}
NULL = {"type": "null"}
USAGE = {
    "input_tokens": NUMBER,
    "cache_creation_input_tokens": NUMBER,
    "cache_read_input_tokens": NUMBER,
    "output_tokens": NUMBER,
    "output_tokens_details": record(thinking_tokens=NUMBER),
}
MESSAGE = record(
    id={"type": "string", "pattern": "^msg_"},
    type={"const": "message"},
    role={"const": "assistant"},
    model=TEXT,
    content={"const": []},
    stop_reason=NULL,
    stop_sequence=NULL,
    usage=record(**USAGE, service_tier={"const": "standard"}),
)
REASONS = ["end_turn", "max_tokens", "stop_sequence", "tool_use", "model_context_window_exceeded"]
BLOCKS = [
    record(type={"const": "text"}, text={"const": ""}),
    record(type={"const": "thinking"}, thinking={"const": ""}, signature={"const": ""}),
    record(type={"const": "tool_use"}, id={"type": "string", "pattern": "^toolu_"}, name=TEXT, input={"const": {}}),
]
SOME = {"type": "string", "minLength": 1}
DELTAS = [
    record(type={"const": "text_delta"}, text=SOME),
    record(type={"const": "thinking_delta"}, thinking=SOME),
    record(type={"const": "signature_delta"}, signature=SOME),
    record(type={"const": "input_json_delta"}, partial_json=TEXT),
]
EVENTS = {
    "message_start": {"message": MESSAGE},
    "content_block_start": {"index": NUMBER, "content_block": {"oneOf": BLOCKS}},
    "content_block_delta": {"index": NUMBER, "delta": {"oneOf": DELTAS}},
    "content_block_stop": {"index": NUMBER},
    "message_delta": {
        "delta": record(stop_reason={"enum": REASONS}, stop_sequence={"type": ["string", "null"]}),
        "usage": record(**USAGE),
    },
    "message_stop": {},
}
VALIDATORS = {
    kind: jsonschema.Draft202012Validator(record(type={"const": kind}, **fields)) for kind, fields in EVENTS.items()
}
DELTAS_OF = {
    "text": {"text_delta"},
    "thinking": {"thinking_delta", "signature_delta"},
    "tool_use": {"input_json_delta"},
}


@dataclass
class DocumentedReader:
    """Reads a stream as its documentation says, event by event, and refuses any other order.

    message_start; blocks with indexes from 0, each started, filled by deltas of its kind, and stopped before the next; a
    thinking block's signature is its last delta; one message_delta; message_stop.
    """

    state: str = "new"
    message: dict[str, Any] = field(default_factory=dict)
    texts: list[str] = field(default_factory=list)
    is_signed: bool = False

    def read(self, event: dict[str, Any]) -> None:
        VALIDATORS[event["type"]].validate(event)
        getattr(self, f"on_{event['type']}")(event)

    def on_message_start(self, event: dict[str, Any]) -> None:
        assert self.state == "new"
        self.state, self.message = "between", json.loads(json.dumps(event["message"]))

    def on_content_block_start(self, event: dict[str, Any]) -> None:
        assert self.state == "between" and event["index"] == len(self.message["content"])
        self.message["content"].append(dict(event["content_block"]))
        self.state, self.texts, self.is_signed = "within", [], False

    def on_content_block_delta(self, event: dict[str, Any]) -> None:
        block, delta = self.message["content"][-1], event["delta"]
        assert self.state == "within" and event["index"] == len(self.message["content"]) - 1
        assert delta["type"] in DELTAS_OF[block["type"]] and not self.is_signed
        if delta["type"] == "signature_delta":
            self.is_signed, block["signature"] = True, delta["signature"]
        else:
            self.texts.append(next(value for key, value in delta.items() if key != "type"))

    def on_content_block_stop(self, event: dict[str, Any]) -> None:
        block = self.message["content"][-1]
        assert self.state == "within" and event["index"] == len(self.message["content"]) - 1
        assert self.is_signed == (block["type"] == "thinking")
        whole = "".join(self.texts)
        if block["type"] == "tool_use":
            block["input"] = json.loads(whole or "{}")
        else:
            block[block["type"]] = whole
        self.state = "between"

    def on_message_delta(self, event: dict[str, Any]) -> None:
        assert self.state == "between"
        self.state = "told"
        self.message |= event["delta"]
        self.message["usage"] |= event["usage"]

    def on_message_stop(self, event: dict[str, Any]) -> None:
        assert self.state == "told"
        self.state = "over"


def read(events: list[dict[str, Any]]) -> dict[str, Any]:
    """The message of a complete stream."""
    reader = DocumentedReader()
    for event in events:
        reader.read(event)
    assert reader.state == "over"
    return reader.message


# --- streams of the pipeline -----------------------------------------------------------------------------------------

WORDS = ["once", " upon", "\n", " ", "a ", "time", "é", "🙂", "{", '"', "<think>", "\t"]


@dataclass
class Played:
    """Events of a made-up generation, in lists as they arrive, and the content that they stand for."""

    batches: list[list[Any]]
    content: list[dict[str, Any]]
    finished: pb.Finished
    usage: pb.Usage


def pieces(rng: random.Random, text: str) -> list[str]:
    """The text in pieces, some of them empty: tokens without text."""
    cuts = sorted(rng.randrange(len(text) + 1) for _ in range(rng.randrange(4)))
    return [text[begin:end] for begin, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]


def value(rng: random.Random, depth: int = 0) -> Any:
    """A random JSON value."""
    kind = rng.randrange(6 if depth < 3 else 4)
    if kind == 4:
        return [value(rng, depth + 1) for _ in range(rng.randrange(3))]
    if kind == 5:
        return {rng.choice(WORDS): value(rng, depth + 1) for _ in range(rng.randrange(3))}
    return [rng.randrange(-9, 99), None, rng.random() < 0.5, "".join(rng.choices(WORDS, k=3))][kind]


def played(rng: random.Random) -> Played:
    """Thinking or none, then texts and calls in any order, and an end."""
    events: list[Any] = [pb.Started()]
    content: list[dict[str, Any]] = []
    if rng.random() < 0.5:
        thought = "".join(rng.choices(WORDS, k=rng.randrange(1, 6)))
        events += [pb.ReasoningDelta(text=piece, token_ids=[1]) for piece in pieces(rng, thought)]
        content.append({"type": "thinking", "thinking": thought})
    num_calls = 0
    for _ in range(rng.randrange(5)):
        if rng.random() < 0.5:
            text = "".join(rng.choices(WORDS, k=rng.randrange(5)))
            events += [pb.Delta(text=piece, token_ids=[2]) for piece in pieces(rng, text)]
            if content and content[-1]["type"] == "text":
                content[-1]["text"] += text
            else:
                content.append({"type": "text", "text": text})
        else:
            given = {rng.choice(WORDS): value(rng) for _ in range(rng.randrange(4))}
            first, *rest = pieces(rng, json.dumps(given, ensure_ascii=False)) if given or rng.random() < 0.5 else [""]
            name = rng.choice(["weather", "time"])
            events.append(pb.ToolCallDelta(index=num_calls, id=f"call_{num_calls}", name=name, arguments=first))
            events += [pb.ToolCallDelta(index=num_calls, arguments=piece, token_ids=[3]) for piece in rest]
            content.append({"type": "tool_use", "id": f"toolu_{num_calls}", "name": name, "input": given})
            num_calls += 1
    # White space alone is content only where it is the end of a message without calls.
    last = len(content) - 1
    kept = [
        block
        for i, block in enumerate(content)
        if block["type"] != "text" or block["text"].strip() or (block["text"] and i == last and not num_calls)
    ]
    finished = rng.choice(
        [
            pb.Finished(reason=CALLS if num_calls else STOP),
            pb.Finished(reason=LENGTH),
            pb.Finished(reason=STOP, stop_string="END"),
            pb.Finished(reason=STOP, stop_token_id=5),
        ]
    )
    prompt = rng.randrange(1, 50)
    usage = pb.Usage(
        prompt_tokens=prompt, cached_prompt_tokens=rng.randrange(prompt), completion_tokens=9, reasoning_tokens=2
    )
    events += [finished, usage]
    batches = []
    while events:
        size = rng.randrange(1, 5)
        batches.append(events[:size])
        events = events[size:]
    return Played(batches, kept, finished, usage)


def made(play: Played, **options: Any) -> list[dict[str, Any]]:
    """The stream of a generation."""
    events = MessageEvents(HEAD, num_prompt_tokens=play.usage.prompt_tokens, **options)
    return [event for batch in play.batches for event in events.add(batch)]


def without_signatures(content: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{key: value for key, value in block.items() if key != "signature"} for block in content]


EXPECTED_REASONS = {STOP: "end_turn", LENGTH: "max_tokens", CALLS: "tool_use"}


@pytest.mark.parametrize("part", range(10))
def test_1000_random_streams(part: int) -> None:
    """Documented order and shapes; read back, each is what was generated, and the whole message of the same generation."""
    for seed in range(100 * part, 100 * part + 100):
        play = played(random.Random(seed))
        stream = made(play)
        message = read(stream)
        assert without_signatures(message["content"]) == play.content, seed
        assert whole_message(stream) == message, seed
        has_stop = play.finished.HasField("stop_string")
        assert message["stop_reason"] == ("stop_sequence" if has_stop else EXPECTED_REASONS[play.finished.reason])
        assert message["stop_sequence"] == ("END" if has_stop else None)
        usage = message["usage"]
        assert usage["input_tokens"] + usage["cache_read_input_tokens"] == play.usage.prompt_tokens
        assert usage["cache_read_input_tokens"] == play.usage.cached_prompt_tokens
        assert (usage["output_tokens"], usage["output_tokens_details"]) == (9, {"thinking_tokens": 2})


def test_omitted_thinking() -> None:
    """The same streams without the texts of thoughts: only their signatures know them."""
    for seed in range(100):
        play = played(random.Random(seed))
        message = read(made(play, omits_thinking=True))
        thoughts = [block for block in message["content"] if block["type"] == "thinking"]
        expected = [block["thinking"] for block in play.content if block["type"] == "thinking"]
        assert all(block["thinking"] == "" for block in thoughts)
        assert [thinking_text("", block["signature"]) for block in thoughts] == expected


def end(reason: int = STOP) -> list[Any]:
    return [pb.Finished(reason=reason), pb.Usage(prompt_tokens=3, completion_tokens=2)]


def test_nothing_is_sent_before_the_first_output() -> None:
    """So an error until then sets the status; tokens without text are no output."""
    events = MessageEvents(HEAD, num_prompt_tokens=3)
    assert events.add([pb.Started(), pb.Delta(token_ids=[1]), pb.ReasoningDelta(token_ids=[1])]) == []
    assert [event["type"] for event in events.add([pb.Delta(text="a")])] == [
        "message_start",
        "content_block_start",
        "content_block_delta",
    ]


def test_an_output_without_text() -> None:
    """Has no blocks."""
    events = MessageEvents(HEAD, num_prompt_tokens=3)
    assert read(events.add([pb.Started(), *end()]))["content"] == []


def test_a_context_that_is_full() -> None:
    """Is told from max_tokens that were reached."""
    events = MessageEvents(HEAD, num_prompt_tokens=3, fills_context=True)
    assert read(events.add([pb.Delta(text="a"), *end(LENGTH)]))["stop_reason"] == "model_context_window_exceeded"
    events = MessageEvents(HEAD, num_prompt_tokens=3, fills_context=True)
    assert read(events.add([pb.Delta(text="a"), *end()]))["stop_reason"] == "end_turn"


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ('{"city": "Rome", "days": [1, 2', {"city": "Rome", "days": [1, 2]}),
        ('{"city": "Rome", "da', {"city": "Rome"}),
        ('{"city": "Ro', {}),
        ("{", {}),
        ("", {}),
        ('{"city": nonsense}', {"INVALID_JSON": '{"city": nonsense}'}),
        ("[1]", {"INVALID_JSON": "[1]"}),
        ('{"a":' * 300, {"INVALID_JSON": '{"a":' * 300}),
    ],
)
def test_input_that_is_no_object(arguments: str, expected: dict[str, Any]) -> None:
    """Of a truncated call the complete part; what is no JSON reaches the client as text, never as an exception."""
    call = pb.ToolCallDelta(index=0, id="call_a", name="weather", arguments=arguments)
    message = whole_message(MessageEvents(HEAD, num_prompt_tokens=3).add([call, *end(LENGTH)]))
    assert message["content"] == [{"type": "tool_use", "id": "toolu_a", "name": "weather", "input": expected}]
