"""What bodies of the Responses API are in our own API, and which are refused under which name. Pure."""

import json
from typing import Any

import pytest

from gateway_svc.openai.responses.carried_reasoning import carried
from gateway_svc.openai.responses.response_dialect import RESPONSES
from gateway_svc.openai.responses.response_request import chat_request, parse_response_request
from protos.inference.v1 import inference_pb2 as pb
from svc_common.errors import InvalidArgument, ResourceExhausted

SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
WEATHER = {"type": "function", "name": "weather", "description": "d", "parameters": SCHEMA, "strict": True}
TIME = {"type": "function", "name": "time"}
USER = {"role": "user", "content": "hi"}


def made(**fields: Any) -> pb.ChatRequest:
    """The message that a body of these fields becomes."""
    request, wishes = parse_response_request(json.dumps({"input": "hi", **fields}).encode())
    return chat_request(request, wishes, request.items())


def refused(**fields: Any) -> tuple[str, str]:
    """Parameter and message of the error that a body of these fields gets."""
    with pytest.raises(InvalidArgument) as caught:
        made(**fields)
    error = RESPONSES.error_body(caught.value, "")["error"]
    return error["param"], error["message"]


def test_a_text() -> None:
    """One message of the user, after the instructions; all scalars have our names."""
    found = made(instructions="be kind", max_output_tokens=9, temperature=0.5, top_p=0.9, seed=3, metadata={"run": "7"})
    assert [(turn.role, turn.content) for turn in found.messages] == [("system", "be kind"), ("user", "hi")]
    assert found.stop.max_tokens == 9
    assert (found.sampling.temperature, found.sampling.top_p, found.sampling.seed) == (0.5, pytest.approx(0.9), 3)
    assert dict(found.labels) == {"run": "7"}


def test_an_assistants_items_are_one_message() -> None:
    """Reasoning, answer and calls in a row; another reasoning or answer after them begins a new one."""
    items = [
        {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "be kind"}]},
        USER,
        {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
        {
            "type": "message",
            "id": "msg_1",
            "status": "completed",
            "role": "assistant",
            "content": [
                {"type": "output_text", "text": "Let me ", "annotations": []},
                {"type": "refusal", "refusal": "no"},
            ],
        },
        {"type": "function_call", "id": "fc_1", "call_id": "a", "name": "weather", "arguments": '{"city":"Rome"}'},
        {"type": "function_call", "call_id": "b", "name": "time", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "a", "output": "sunny"},
        {"type": "function_call_output", "call_id": "b", "output": [{"type": "input_text", "text": "noon"}]},
        {"role": "assistant", "content": "It is sunny."},
        {"type": "reasoning", "summary": [], "encrypted_content": carried("so")},
        {"role": "assistant", "content": "And noon."},
        {"type": "reasoning", "summary": [{"type": "summary_text", "text": "thus"}]},
        {"type": "function_call", "call_id": "c", "name": "time", "arguments": "{}"},
    ]
    found = made(input=items, tools=[WEATHER, TIME]).messages
    assert [turn.role for turn in found] == ["developer", "user", "assistant", "tool", "tool", *["assistant"] * 3]
    assert (found[2].reasoning, found[2].content) == ("hm", "Let me no")
    assert list(found[2].tool_calls) == [
        pb.ToolCall(id="a", name="weather", arguments='{"city":"Rome"}'),
        pb.ToolCall(id="b", name="time", arguments="{}"),
    ]
    assert [(turn.tool_call_id, turn.content) for turn in found[3:5]] == [("a", "sunny"), ("b", "noon")]
    assert [(turn.content, turn.reasoning) for turn in found[5:]] == [
        ("It is sunny.", ""),
        ("And noon.", "so"),
        ("", "thus"),
    ]
    assert found[7].tool_calls[0].id == "c"


ALLOWED = {"type": "allowed_tools", "mode": "required", "tools": [TIME]}
CHOICES: list[tuple[Any, pb.ToolChoice | None, list[str]]] = [
    (None, None, ["weather", "time"]),
    ("auto", pb.ToolChoice(mode=pb.TOOL_MODE_AUTO), ["weather", "time"]),
    ("none", pb.ToolChoice(mode=pb.TOOL_MODE_NONE), ["weather", "time"]),
    ("required", pb.ToolChoice(mode=pb.TOOL_MODE_REQUIRED), ["weather", "time"]),
    ({"type": "function", "name": "time"}, pb.ToolChoice(name="time"), ["weather", "time"]),
    (ALLOWED, pb.ToolChoice(mode=pb.TOOL_MODE_REQUIRED), ["time"]),
]


@pytest.mark.parametrize(("choice", "expected", "names"), CHOICES)
def test_tool_choices(choice: Any, expected: pb.ToolChoice | None, names: list[str]) -> None:
    """Each in our API."""
    found = made(tools=[WEATHER, TIME], tool_choice=choice, parallel_tool_calls=False)
    assert (found.tool_choice if found.HasField("tool_choice") else None) == expected
    assert [tool.name for tool in found.tools] == names
    assert json.loads(found.tools[0].parameters_json) == SCHEMA if "weather" in names else True
    assert found.parallel_tool_calls is False


def test_formats() -> None:
    """text.format, and vLLM's fields beside it; several wishes are refused under this API's name."""
    named = {"type": "json_schema", "name": "city", "schema": SCHEMA, "strict": True}
    assert json.loads(made(text={"format": named}).json_schema) == SCHEMA
    assert json.loads(made(text={"format": {"type": "json_object"}}).json_schema) == {"type": "object"}
    assert made(text={"format": {"type": "text"}}).WhichOneof("structured_output") is None
    assert made(guided_regex="a+").regex == "a+"
    assert refused(text={"format": {"type": "json_schema"}})[0] == "text.format"
    assert refused(text={"format": named}, guided_regex="a+")[0] == "text.format"


def test_reasoning_and_log_probabilities() -> None:
    """Effort is a template variable; log probabilities are asked for by `include` or by their number."""
    found = made(reasoning={"effort": "none", "summary": "auto"}, chat_template_kwargs={"x": 1})
    assert json.loads(found.template_arguments_json) == {"reasoning_effort": "none", "enable_thinking": False, "x": 1}
    assert made(include=["message.output_text.logprobs"]).response.logprobs
    assert made(top_logprobs=2).response.num_top_logprobs == 2
    assert not made(include=["reasoning.encrypted_content"]).response.logprobs


IMAGE = {"role": "user", "content": [{"type": "input_text", "text": "a"}, {"type": "input_image", "image_url": "u"}]}
REFUSED: list[tuple[str, dict[str, Any]]] = [
    ("input", {"input": []}),
    ("input[0].content[1]", {"input": [IMAGE]}),
    ("input[1]", {"input": [USER, {"type": "web_search_call", "id": "ws_1"}]}),
    ("input[0]", {"input": [{"content": "hi"}]}),
    ("input[0].content", {"input": [{"role": "user"}]}),
    ("input[0].call_id", {"input": [{"type": "function_call_output", "output": "x"}]}),
    ("input[0].encrypted_content", {"input": [{"type": "reasoning", "summary": [], "encrypted_content": "gAAAA"}]}),
    ("input", {"input": 7}),
    ("tools[1]", {"tools": [TIME, {"type": "web_search"}]}),
    ("tools[0].parameters", {"tools": [{**TIME, "parameters": {"x": "y" * 300_000}}]}),
    ("tool_choice", {"tools": [TIME], "tool_choice": {"type": "web_search_preview"}}),
    ("tool_choice", {"tools": [TIME], "tool_choice": {"type": "function", "name": "other"}}),
    ("tool_choice", {"tool_choice": "required"}),
    ("tool_choice.tools", {"tools": [TIME], "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": []}}),
    ("text.format", {"text": {"format": {"type": "json_schema", "schema": {"x": "y" * 300_000}}}}),
    ("text.verbosity", {"text": {"verbosity": "low"}}),
    ("reasoning.summary", {"reasoning": {"summary": "concise"}}),
    ("truncation", {"truncation": "auto"}),
    ("conversation", {"conversation": "conv_1"}),
    ("prompt", {"prompt": {"id": "pmpt_1"}}),
    ("max_tokens", {"max_tokens": 5}),
    ("response_format", {"response_format": {"type": "json_object"}}),
    ("n", {"n": 2}),
    ("top_logprobs", {"top_logprobs": 21}),
    ("typical_p", {"typical_p": 0.5}),
    ("stream_options", {"stream_options": {"include_obfuscation": False}}),
]


@pytest.mark.parametrize(("param", "fields"), REFUSED)
def test_what_is_not_supported_is_refused_by_name(param: str, fields: dict[str, Any]) -> None:
    """Never ignored."""
    found, message = refused(**fields)
    assert found == param
    assert message.startswith(param)


def test_what_has_no_effect_is_accepted() -> None:
    """Unknown fields, and known ones that cannot change the output."""
    plain = made()
    neutral = {
        "user": "a",
        "safety_identifier": "b",
        "prompt_cache_key": "c",
        "service_tier": "auto",
        "truncation": "disabled",
        "max_tool_calls": 3,
        "text": {"verbosity": "medium"},
        "include": ["file_search_call.results"],
        "made_up": {"x": 1},
        "conversation": None,
    }
    assert made(**neutral) == plain


def test_errors_have_this_apis_names() -> None:
    """Also those of checks behind the request, in body and event."""
    error = InvalidArgument.field("stop.max_tokens", "is 0")
    assert RESPONSES.error_body(error, "")["error"]["param"] == "max_output_tokens"
    assert RESPONSES.error_body(error, "")["error"]["message"] == "max_output_tokens: is 0"
    assert RESPONSES.error_body(InvalidArgument.field("messages[3].role", "x"), "")["error"]["param"] == "input"
    event = RESPONSES.error_event(ResourceExhausted("full"), "")
    assert RESPONSES.event_name(event) == "error"
    assert (event["code"], event["message"], event["param"]) == ("resource_exhausted", "full", None)
