"""Forced tool calls of the real model: arguments that fit their schemas, streams that say what the unary answer says."""

import json
from collections.abc import Iterator
from typing import Any

import grpc
import jsonschema
import pytest

from protos.common.v1 import common_pb2
from protos.inference.v1 import inference_pb2 as pb
from protos.inference.v1 import inference_pb2_grpc
from quire.local_stack.stack import LocalStack

SCHEMAS: dict[str, dict[str, Any]] = {
    "get_weather": {
        "type": "object",
        "properties": {"city": {"enum": ["Paris", "Zürich"]}, "days": {"type": "integer", "minimum": 1, "maximum": 14}},
        "required": ["city", "days"],
        "additionalProperties": False,
    },
    "set_flags": {
        "type": "object",
        "properties": {"flags": {"type": "array", "items": {"type": "boolean"}, "minItems": 1, "maxItems": 3}},
        "required": ["flags"],
        "additionalProperties": False,
    },
    "note": {
        "type": "object",
        "properties": {"text": {"type": "string", "maxLength": 12}},
        "required": ["text"],
        "additionalProperties": False,
    },
}


@pytest.fixture(scope="module")
def stub(stack: LocalStack) -> Iterator[inference_pb2_grpc.InferenceServiceStub]:
    with grpc.insecure_channel(stack.grpc_address) as channel:
        yield inference_pb2_grpc.InferenceServiceStub(channel)


def request(choice: pb.ToolChoice, **fields: Any) -> pb.ChatRequest:
    """A question with three tools, sampled."""
    return pb.ChatRequest(
        messages=[pb.Message(role="user", content="What is the weather like?")],
        tools=[pb.Tool(name=name, parameters_json=json.dumps(schema)) for name, schema in SCHEMAS.items()],
        tool_choice=choice,
        stop=pb.StopConditions(max_tokens=300),
        **fields,
    )


REQUIRED = pb.ToolChoice(mode=pb.TOOL_MODE_REQUIRED)


def test_required_calls_fit_their_schemas(stub: inference_pb2_grpc.InferenceServiceStub) -> None:
    """Several choices, each with its own calls and ids; the built-in model has never seen a tool."""
    asked = request(REQUIRED, parallel_tool_calls=False, sampling=pb.SamplingParams(n=8, seed=3))
    answer = stub.Chat(asked, timeout=60)
    ids = set()
    for choice in answer.choices:
        assert choice.finished.reason == common_pb2.FINISH_REASON_TOOL_CALLS
        (call,) = choice.tool_calls
        jsonschema.validate(json.loads(call.arguments), SCHEMAS[call.name])
        assert not choice.text
        assert not choice.reasoning
        ids.add(call.id)
    assert len(ids) == 8
    assert answer.usage.completion_tokens == sum(len(choice.token_ids) for choice in answer.choices)


def test_tools_beside_a_schema_are_calls_or_an_answer(stub: inference_pb2_grpc.InferenceServiceStub) -> None:
    """As agent frameworks send it: whatever the model prefers, each choice is one of the two, whole."""
    schema = {
        "type": "object",
        "properties": {"n": {"type": "integer"}},
        "required": ["n"],
        "additionalProperties": False,
    }
    sampling = pb.SamplingParams(n=8, seed=3, temperature=1.0)
    auto = pb.ToolChoice(mode=pb.TOOL_MODE_AUTO)
    answer = stub.Chat(request(auto, json_schema=json.dumps(schema), sampling=sampling), timeout=60)
    for choice in answer.choices:
        called = choice.finished.reason == common_pb2.FINISH_REASON_TOOL_CALLS
        assert bool(choice.tool_calls) == called and bool(choice.text) != called
        for call in choice.tool_calls:
            jsonschema.validate(json.loads(call.arguments), SCHEMAS[call.name])
        if not called and choice.finished.reason != common_pb2.FINISH_REASON_LENGTH:
            jsonschema.validate(json.loads(choice.text), schema)


@pytest.mark.parametrize("name", ["note"])
def test_a_stream_says_what_the_unary_answer_says(stub: inference_pb2_grpc.InferenceServiceStub, name: str) -> None:
    """The same seed: pieces of the named call join to its arguments, tokens and log probabilities are in deltas once, in order."""
    asked = request(
        pb.ToolChoice(name=name), sampling=pb.SamplingParams(seed=5), response=pb.ResponseOptions(logprobs=True)
    )
    (whole,) = stub.Chat(asked, timeout=60).choices
    (call,) = whole.tool_calls
    assert call.name == name
    jsonschema.validate(json.loads(call.arguments), SCHEMAS[name])
    arguments, token_ids, logprobs, names = "", [], [], []
    for event in stub.ChatStream(asked, timeout=60):
        kind = event.WhichOneof("event")
        if kind not in ("delta", "tool_call_delta"):
            continue
        delta = getattr(event, kind)
        assert delta.token_offset == len(token_ids)
        token_ids += delta.token_ids
        logprobs += delta.logprobs
        if kind == "tool_call_delta":
            arguments += delta.arguments
            names += [delta.name] if delta.id else []
    assert (arguments, names) == (call.arguments, [name])
    assert token_ids == list(whole.token_ids)
    assert logprobs == pytest.approx(list(whole.logprobs))


def test_a_conversation_goes_on_behind_a_call(stub: inference_pb2_grpc.InferenceServiceStub) -> None:
    """The built-in template takes calls and answers of tools; a count says what the prompt has."""
    asked = request(pb.ToolChoice(mode=pb.TOOL_MODE_AUTO))
    asked.stop.max_tokens = 4
    asked.messages.add(role="assistant").tool_calls.add(id="call_1", name="note", arguments='{"text": "é"}')
    asked.messages.add(role="tool", content="noted", tool_call_id="call_1")
    answer = stub.Chat(asked, timeout=60)
    assert answer.choices[0].finished.reason in (common_pb2.FINISH_REASON_LENGTH, common_pb2.FINISH_REASON_STOP)
    asked.tool_choice.mode = pb.TOOL_MODE_NONE
    assert stub.Chat(asked, timeout=60).usage.prompt_tokens < answer.usage.prompt_tokens


def test_bad_tools_are_the_callers_mistake(stub: inference_pb2_grpc.InferenceServiceStub) -> None:
    """INVALID_ARGUMENT, with every field at fault."""
    asked = request(pb.ToolChoice(name="nobody"), template_arguments_json='{"messages": []}', regex="a")
    asked.tools.add(name="bad name!", parameters_json="[")
    with pytest.raises(grpc.RpcError) as caught:
        stub.Chat(asked, timeout=60)
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    for field in (
        "tools[3].name",
        "tools[3].parameters_json",
        "tool_choice.name",
        "template_arguments_json",
    ):
        assert field in caught.value.details()
