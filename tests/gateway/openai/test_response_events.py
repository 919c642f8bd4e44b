"""Events of the Responses API: order, numbers and sums, checked by rules written here and by the official package's types.

Pure. The rules are those of OpenAI's streaming reference: each item is announced, filled and ended before the next.
"""

import random
from typing import Any

import openai
import pytest
from openai.lib.streaming.responses._responses import ResponseStreamState
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from gateway_svc.generating.generation import Event
from gateway_svc.openai.answers.token_entries import TokenEntries
from gateway_svc.openai.responses.carried_reasoning import carried_text
from gateway_svc.openai.responses.output_items import ItemOptions
from gateway_svc.openai.responses.response_answer import ResponseAnswer
from gateway_svc.openai.responses.response_head import response_head
from gateway_svc.openai.responses.response_request import ResponseRequest
from protos.common.v1 import common_pb2
from protos.inference.v1 import inference_pb2 as pb
from svc_common.errors import ResourceExhausted, Unavailable
from tests.support.services.models import tiny

Json = dict[str, Any]
EVENTS: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
NUM_STREAMS = 1_000
_WORDS = ("a", "é", "\n", " the", '{"x":', "1}", "日本")


def answer(**options: Any) -> ResponseAnswer:
    """An answer to an empty request."""
    head = response_head(ResponseRequest.model_validate({}), "r_1", "tiny", 5, is_stored=False)
    return ResponseAnswer(head, "r_1", ItemOptions(TokenEntries(tiny(), as_ids=False), **options))


def random_events(rng: random.Random) -> list[Event]:
    """A stream of the pipeline: reasoning, text and calls in any order and number, marks between them, one finish, usage."""
    events: list[Event] = [pb.Started()]
    num_calls = 0
    for _ in range(rng.randrange(6)):
        kind = rng.choice(("text", "reasoning", "call", "mark"))
        pieces = [rng.choice(_WORDS) for _ in range(rng.randrange(1, 5))]
        if kind == "text":
            events += [_text(rng, piece) for piece in pieces]
        elif kind == "reasoning":
            events += [pb.ReasoningDelta(text=piece, token_ids=[7]) for piece in pieces]
        elif kind == "call":
            events.append(pb.ToolCallDelta(index=num_calls, id=f"call_{num_calls}", name="f", token_ids=[8]))
            events += [pb.ToolCallDelta(index=num_calls, arguments=piece, token_ids=[9]) for piece in pieces]
            num_calls += 1
        else:
            events.append(rng.choice((pb.Delta(token_ids=[8]), pb.ReasoningDelta(token_ids=[8]))))
    reasons = (common_pb2.FINISH_REASON_STOP, common_pb2.FINISH_REASON_TOOL_CALLS, common_pb2.FINISH_REASON_LENGTH)
    events.append(pb.Finished(reason=rng.choice(reasons)))
    return [*events, pb.Usage(prompt_tokens=3, cached_prompt_tokens=1, completion_tokens=9, reasoning_tokens=2)]


def _text(rng: random.Random, piece: str) -> pb.Delta:
    if rng.random() < 0.5:
        return pb.Delta(text=piece, token_ids=[7])
    tops = [pb.TopLogprobs(token_ids=[7, 8], logprobs=[-0.5, -1.5])]
    return pb.Delta(text=piece, token_ids=[7], logprobs=[-0.5], top_logprobs=tops)


def batched(rng: random.Random, events: list[Event]) -> list[list[Event]]:
    """Cut into lists of random lengths, as merged updates are."""
    cuts = sorted(rng.sample(range(1, len(events)), rng.randrange(len(events) - 1)))
    return [events[i:j] for i, j in zip([0, *cuts], [*cuts, len(events)], strict=True)]


class Reader:
    """What a client knows from the events so far; raises AssertionError for an event out of order."""

    def __init__(self) -> None:
        self.output: list[Json] = []
        self.final: Json | None = None
        self._num_events = 0
        self._state = "start"
        self._text = ""
        self._logprobs: list[Json] = []

    def read(self, event: Json) -> None:
        """Check and apply one event."""
        assert event["sequence_number"] == self._num_events
        self._num_events += 1
        kind = event["type"].removeprefix("response.")
        getattr(self, f"_{kind.replace('.', '_')}")(event)

    def _step(self, before: str, after: str) -> None:
        assert self._state == before, (self._state, after)
        self._state = after

    def _created(self, event: Json) -> None:
        self._step("start", "created")
        assert (event["response"]["status"], event["response"]["output"]) == ("in_progress", [])

    def _in_progress(self, event: Json) -> None:
        self._step("created", "between")
        assert event["response"]["usage"] is None

    def _output_item_added(self, event: Json) -> None:
        self._step("between", f"added {event['item']['type']}")
        assert event["output_index"] == len(self.output)
        item = event["item"]
        assert item["status"] == "in_progress"
        assert not (item.get("content") or item.get("summary") or item.get("arguments"))
        self.output.append(item)
        self._text, self._logprobs = "", []

    def _at_item(self, event: Json) -> None:
        assert event["output_index"] == len(self.output) - 1
        assert event["item_id"] == self.output[-1]["id"]

    def _content_part_added(self, event: Json) -> None:
        kind = {"message": "output_text", "reasoning": "reasoning_text"}[self.output[-1]["type"]]
        self._step(f"added {self.output[-1]['type']}", f"in {kind}")
        self._at_item(event)
        assert (event["content_index"], event["part"]["type"], event["part"]["text"]) == (0, kind, "")

    def _reasoning_summary_part_added(self, event: Json) -> None:
        self._step("added reasoning", "in reasoning_summary_text")
        self._at_item(event)
        assert (event["summary_index"], event["part"]) == (0, {"type": "summary_text", "text": ""})

    def _delta(self, kind: str, event: Json) -> None:
        self._step(f"in {kind}", f"in {kind}")
        self._at_item(event)
        assert event["delta"]
        self._text += event["delta"]
        self._logprobs += event.get("logprobs", [])

    def _done(self, kind: str, event: Json) -> None:
        self._step(f"in {kind}", f"done {kind}")
        self._at_item(event)
        assert event["text"] == self._text

    def _output_text_delta(self, event: Json) -> None:
        self._delta("output_text", event)

    def _output_text_done(self, event: Json) -> None:
        self._done("output_text", event)
        assert event["logprobs"] == self._logprobs

    def _reasoning_text_delta(self, event: Json) -> None:
        self._delta("reasoning_text", event)

    def _reasoning_text_done(self, event: Json) -> None:
        self._done("reasoning_text", event)

    def _reasoning_summary_text_delta(self, event: Json) -> None:
        self._delta("reasoning_summary_text", event)

    def _reasoning_summary_text_done(self, event: Json) -> None:
        self._done("reasoning_summary_text", event)

    def _content_part_done(self, event: Json) -> None:
        self._step(f"done {event['part']['type']}", "part done")
        self._at_item(event)
        assert event["part"]["text"] == self._text
        self.output[-1]["content"] = [event["part"]]

    def _reasoning_summary_part_done(self, event: Json) -> None:
        self._step("done reasoning_summary_text", "part done")
        self._at_item(event)
        self.output[-1]["summary"] = [event["part"]]

    def _function_call_arguments_delta(self, event: Json) -> None:
        assert self._state in ("added function_call", "in arguments")
        self._state = "in arguments"
        self._at_item(event)
        self._text += event["delta"]

    def _function_call_arguments_done(self, event: Json) -> None:
        assert self._state in ("added function_call", "in arguments")
        self._state = "part done"
        self._at_item(event)
        assert event["arguments"] == self._text
        self.output[-1]["arguments"] = self._text

    def _output_item_done(self, event: Json) -> None:
        self._step("part done", "between")
        assert event["output_index"] == len(self.output) - 1
        known = {**self.output[-1], "status": event["item"]["status"]}
        if "encrypted_content" in known:
            assert carried_text(event["item"]["encrypted_content"], "x") == self._text
            known["encrypted_content"] = event["item"]["encrypted_content"]
        assert event["item"] == known
        self.output[-1] = event["item"]

    def _completed(self, event: Json) -> None:
        self._step("between", "end")
        self.final = event["response"]
        assert self.final["status"] == "completed"
        assert {item["status"] for item in self.output} == {"completed"}

    def _incomplete(self, event: Json) -> None:
        self._step("between", "end")
        self.final = event["response"]
        assert self.final["incomplete_details"] == {"reason": "max_output_tokens"}
        assert [item["status"] for item in self.output] == ["completed"] * (len(self.output) - 1) + ["incomplete"]


def expected_output(events: list[Event]) -> list[tuple[str, str]]:
    """Kind and text of each item, from the pipeline's events alone."""
    found: list[tuple[tuple[str, int], str]] = []
    for event in events:
        match event:
            case pb.ToolCallDelta():
                key, text = ("function_call", event.index), event.arguments
            case pb.Delta() | pb.ReasoningDelta() if event.text:
                key, text = ("message" if isinstance(event, pb.Delta) else "reasoning", -1), event.text
            case _:
                continue
        if found and found[-1][0] == key:
            text = found.pop()[1] + text
        found.append((key, text))
    return [(kind, text) for (kind, _), text in found] or [("message", "")]


def text_of(item: Json) -> str:
    """An item's text."""
    if item["type"] == "function_call":
        return str(item["arguments"])
    return "".join(part["text"] for part in [*item.get("content", []), *item.get("summary", [])])


@pytest.mark.parametrize("block", range(10))
def test_random_streams(block: int) -> None:
    """Order, numbers, types; the sum of the events is the last event's response and the whole answer, which is the pipeline's."""
    for seed in range(block * NUM_STREAMS // 10, (block + 1) * NUM_STREAMS // 10):
        rng = random.Random(seed)
        events = random_events(rng)
        options = {"summarized": rng.random() < 0.5, "carries_reasoning": rng.random() < 0.5}
        streamed, whole, reader = answer(**options), answer(**options), Reader()
        told = [event for part in batched(rng, events) for event in streamed.events(part)]
        streamed.complete(7)
        told += streamed.last_events()
        for event in told:
            EVENTS.validate_python(event)
            reader.read(event)
        whole.events(events)
        whole.complete(7)
        assert reader.final == whole.response()
        assert reader.output == reader.final["output"]
        assert [(item["type"], text_of(item)) for item in reader.output] == expected_output(events)
        Response.model_validate(reader.final)


def test_the_official_package_adds_them_up() -> None:
    """Its own accumulator arrives at the whole answer, but for reasoning, of which it takes in no text."""
    for seed in range(50):
        events = random_events(random.Random(seed))
        made = answer()
        state: ResponseStreamState[Any] = ResponseStreamState(input_tools=[], text_format=openai.omit)
        for event in made.events(events):
            state.handle_event(EVENTS.validate_python(event))
        snapshot = state._ResponseStreamState__current_snapshot  # type: ignore[attr-defined]
        texts = [(item.type, text_of(item.to_dict())) for item in snapshot.output]
        assert texts == [(kind, "" if kind == "reasoning" else text) for kind, text in expected_output(events)]


def test_the_first_events_come_with_the_first_output() -> None:
    """Until then, an error can still have its own status."""
    made = answer()
    assert made.events([pb.Started()]) == []
    first = [event["type"] for event in made.events([pb.Delta(text="a", token_ids=[5])])]
    assert first[:3] == ["response.created", "response.in_progress", "response.output_item.added"]


def test_a_failure_is_the_last_event() -> None:
    """With what was made so far, and a code of OpenAI's."""
    made = answer()
    made.events([pb.Delta(text="a", token_ids=[5])])
    made.fail(Unavailable("gone"))
    (last,) = made.last_events()
    EVENTS.validate_python(last)
    assert (last["type"], last["sequence_number"]) == ("response.failed", 5)
    assert last["response"]["error"] == {"code": "server_error", "message": "gone"}
    assert last["response"]["output"][0]["content"][0]["text"] == "a"
    assert last["response"]["output"][0]["status"] == "incomplete"
    full = answer()
    full.fail(ResourceExhausted("full"))
    told = full.last_events()
    assert [event["type"] for event in told] == ["response.created", "response.in_progress", "response.failed"]
    assert told[-1]["response"]["error"]["code"] == "rate_limit_exceeded"
