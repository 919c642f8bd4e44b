"""What OpenAI's fields are in our own API, and which are refused under which name. Pure."""

import json
from typing import Any

import pytest

from gateway_svc.http.errors import error_body, error_headers, http_status, param_of
from gateway_svc.http.json_body import MAX_PART_DEPTH
from gateway_svc.openai.requests.chat_request import ChatCompletionRequest
from gateway_svc.openai.requests.completion_request import CompletionRequest, parse_request
from protos.inference.v1 import inference_pb2 as pb
from svc_common.errors import AlreadyExists, InvalidArgument, NotFound, ResourceExhausted, Unavailable

SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
WEATHER = {
    "type": "function",
    "function": {"name": "weather", "description": "d", "parameters": SCHEMA, "strict": True},
}
TIME = {"type": "function", "function": {"name": "time"}}
USER = {"role": "user", "content": "hi"}


def chat(**fields: Any) -> pb.ChatRequest:
    """The message that a body of these fields becomes."""
    body = {"messages": [USER], **fields}
    _, (message,) = parse_request(ChatCompletionRequest, json.dumps(body).encode())
    assert isinstance(message, pb.ChatRequest)
    return message


def test_a_round_with_tools() -> None:
    """Calls, their answers, thoughts under both names, names, null content, content in parts."""
    call = {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": '{"city":"Rome"}'}}
    turns = [
        {"role": "developer", "content": [{"type": "text", "text": "be "}, {"type": "text", "text": "kind"}]},
        {"role": "user", "content": "hi", "name": "ann"},
        {"role": "assistant", "content": None, "tool_calls": [call], "reasoning_content": "hm"},
        {"role": "tool", "tool_call_id": "call_1", "content": "sunny"},
        {"role": "assistant", "content": "It is sunny.", "reasoning": "so", "refusal": None, "audio": None},
        {"role": "assistant", "content": [{"type": "refusal", "refusal": "no"}]},
        {"role": "assistant", "refusal": "no"},
    ]
    found = chat(messages=turns, tools=[WEATHER, TIME])
    assert [turn.content for turn in found.messages] == ["be kind", "hi", "", "sunny", "It is sunny.", "no", "no"]
    assert [turn.role for turn in found.messages][:4] == ["developer", "user", "assistant", "tool"]
    assert found.messages[1].name == "ann"
    assert found.messages[2].tool_calls[0] == pb.ToolCall(id="call_1", name="weather", arguments='{"city":"Rome"}')
    assert (found.messages[2].reasoning, found.messages[4].reasoning) == ("hm", "so")
    assert found.messages[3].tool_call_id == "call_1"
    assert [(tool.name, tool.description) for tool in found.tools] == [("weather", "d"), ("time", "")]
    assert json.loads(found.tools[0].parameters_json) == SCHEMA
    assert found.tools[1].parameters_json == ""


ALLOWED = {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [TIME]}}
CHOICES: list[tuple[Any, pb.ToolChoice | None, list[str]]] = [
    (None, None, ["weather", "time"]),
    ("auto", pb.ToolChoice(mode=pb.TOOL_MODE_AUTO), ["weather", "time"]),
    ("none", pb.ToolChoice(mode=pb.TOOL_MODE_NONE), ["weather", "time"]),
    ("required", pb.ToolChoice(mode=pb.TOOL_MODE_REQUIRED), ["weather", "time"]),
    ({"type": "function", "function": {"name": "time"}}, pb.ToolChoice(name="time"), ["weather", "time"]),
    (ALLOWED, pb.ToolChoice(mode=pb.TOOL_MODE_REQUIRED), ["time"]),
]


@pytest.mark.parametrize(("choice", "expected", "names"), CHOICES)
def test_tool_choice(choice: Any, expected: pb.ToolChoice | None, names: list[str]) -> None:
    """Every spelling; of allowed_tools those that are allowed."""
    found = chat(tools=[WEATHER, TIME], tool_choice=choice, parallel_tool_calls=False)
    assert (found.tool_choice if found.HasField("tool_choice") else None) == expected
    assert [tool.name for tool in found.tools] == names
    assert found.parallel_tool_calls is False


def test_choices_without_tools_change_nothing() -> None:
    """What clients send by default."""
    for choice in ("none", "auto"):
        found = chat(tool_choice=choice, tools=[], parallel_tool_calls=True)
        assert not found.HasField("tool_choice")
        assert not found.HasField("parallel_tool_calls")


def test_template_arguments() -> None:
    """reasoning_effort goes to the template; what chat_template_kwargs say wins."""
    assert json.loads(chat(reasoning_effort="low").template_arguments_json) == {"reasoning_effort": "low"}
    off = json.loads(chat(reasoning_effort="none").template_arguments_json)
    assert off == {"reasoning_effort": "none", "enable_thinking": False}
    kwargs = {"enable_thinking": True, "x": [1]}
    both = json.loads(chat(reasoning_effort="none", chat_template_kwargs=kwargs).template_arguments_json)
    assert both == {"reasoning_effort": "none", "enable_thinking": True, "x": [1]}
    assert chat().template_arguments_json == ""


def test_fields_that_say_nothing_about_the_output() -> None:
    """Accepted; of metadata what fits becomes labels, and no key of a cache becomes a salt."""
    metadata = {"run": "7", "long": "x" * 65, "é" * 33: "y"}
    found = chat(
        metadata=metadata,
        store=True,
        user="someone",
        safety_identifier="s",
        prompt_cache_key="k",
        service_tier="auto",
        stream=True,
        stream_options={"include_usage": True, "include_obfuscation": False},
    )
    assert dict(found.labels) == {"run": "7"}
    assert found.cache.cache_salt == ""
    assert len(chat(metadata={str(i): "v" for i in range(20)}).labels) == 16


def test_fields_of_ours() -> None:
    """What to do at the deadline, and resumable requests."""
    found = chat(on_deadline="return_partial", resumable=True)
    assert found.scheduling.on_deadline == pb.ON_DEADLINE_RETURN_PARTIAL
    assert found.resumable


def test_echo_asks_for_the_prompts_log_probabilities() -> None:
    """As lm-eval sends it; max_tokens 0 with echo alone."""
    body = {"prompt": [[1, 2], [3]], "max_tokens": 0, "echo": True, "logprobs": 1, "temperature": 0, "seed": 1234}
    request, messages = parse_request(CompletionRequest, json.dumps(body).encode())
    assert [list(message.token_ids.ids) for message in messages] == [[1, 2], [3]]
    assert all(message.response.num_prompt_logprobs == 1 for message in messages)
    assert all(message.stop.max_tokens == 1 for message in messages)
    assert request.options().only_echo
    _, (plain,) = parse_request(CompletionRequest, b'{"prompt": "x", "echo": true}')
    assert not plain.response.HasField("num_prompt_logprobs")
    _, (without,) = parse_request(CompletionRequest, b'{"prompt": "x", "max_tokens": 0}')
    assert without.stop.HasField("max_tokens")
    assert without.stop.max_tokens == 0  # refused by the checks that both doors share


REFUSED: list[tuple[dict[str, Any], str]] = [
    (
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": kind}]}]},
        "messages[0].content[1]",
    )
    for kind in ("image_url", "input_audio", "file", "video_url")
]
REFUSED += [
    ({"messages": [USER, {"role": "user"}]}, "messages[1].content"),
    ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text"),
    ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
    ({"messages": [{"content": "x"}]}, "messages[0].role"),
    ({"messages": [{"role": "assistant", "content": None, "tool_calls": [{}]}]}, "messages[0].tool_calls"),
    ({"messages": [{"role": "assistant", "function_call": {"name": "f"}}]}, "messages[0].function_call"),
    ({"messages": [{"role": "assistant", "audio": {"id": "a"}}]}, "messages[0].audio"),
    ({"messages": "hi"}, "messages"),
    ({"messages": [USER] * 4097}, "messages"),
    ({"tools": [{"type": "custom", "custom": {"name": "x"}}]}, "tools[0].function"),
    ({"tools": [WEATHER, {"type": "function", "function": {"parameters": {}}}]}, "tools[1].function"),
    ({"tools": [TIME] * 129}, "tools"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"tool_choice": {"type": "function", "function": {"name": "time"}}}, "tool_choice"),
    ({"tools": [WEATHER], "tool_choice": ALLOWED}, "tool_choice"),
    ({"tools": [WEATHER], "tool_choice": {"type": "custom"}}, "tool_choice"),
    ({"functions": [{"name": "f"}]}, "functions"),
    ({"function_call": {"name": "f"}}, "function_call"),
    ({"top_logprobs": 2}, "top_logprobs"),
    ({"reasoning_effort": "extreme"}, "reasoning_effort"),
    ({"chat_template_kwargs": [1]}, "chat_template_kwargs"),
    ({"chat_template": "x"}, "chat_template"),
    ({"modalities": ["text", "audio"]}, "modalities"),
    ({"prediction": {"type": "content", "content": "x"}}, "prediction"),
    ({"web_search_options": {}}, "web_search_options"),
    ({"stream_options": {"include_usage": True}}, "stream_options"),
    ({"logit_bias": {"none": 1}}, "logit_bias"),
    ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
    ({"truncation_side": "right"}, "truncation_side"),
    ({"prompt_logprobs": -1}, "prompt_logprobs"),
    ({"metadata": {"a": 1}}, "metadata"),
    ({"on_deadline": "wait"}, "on_deadline"),
]


@pytest.mark.parametrize(("fields", "param"), REFUSED)
def test_what_is_refused_is_named(fields: dict[str, Any], param: str) -> None:
    """InvalidArgument with OpenAI's name of the parameter, places in messages and tools included."""
    with pytest.raises(InvalidArgument) as caught:
        chat(**fields)
    error = error_body(caught.value)["error"]
    assert (error["param"], error["type"]) == (param, "invalid_request_error")


# --- bounded cost ----------------------------------------------------------------------------------------------------


def nested(depth: int) -> dict[str, Any]:
    """A schema of so many levels."""
    made: dict[str, Any] = {}
    for _ in range(depth):
        made = {"items": made}
    return made


def test_free_form_parts_are_bounded() -> None:
    """Tools, template arguments and schemas: depth and size, named; below the bounds they pass."""
    for depth, good in ((MAX_PART_DEPTH - 1, True), (MAX_PART_DEPTH + 1, False), (900, False), (5_000, False)):
        for name, fields in {
            "tools[0].function.parameters": {"tools": [{"function": {"name": "f", "parameters": nested(depth)}}]},
            "chat_template_kwargs": {"chat_template_kwargs": nested(depth)},
            "response_format": {"response_format": {"type": "json_schema", "json_schema": {"schema": nested(depth)}}},
        }.items():
            body = b'{"messages": [{"role": "user", "content": "x"}], ' + _dumps(fields)[1:]
            if good:
                parse_request(ChatCompletionRequest, body)
                continue
            with pytest.raises(InvalidArgument) as caught:
                parse_request(ChatCompletionRequest, body)
            assert caught.value.violations[0].field in (name, "body")
    with pytest.raises(InvalidArgument, match="bytes"):
        chat(chat_template_kwargs={"x": "y" * 300_000})


def _dumps(value: Any) -> bytes:
    """As json.dumps, for any depth."""
    if isinstance(value, dict):
        return b"{" + b",".join(json.dumps(k).encode() + b":" + _flat(v) for k, v in value.items()) + b"}"
    return json.dumps(value).encode()


def _flat(value: Any) -> bytes:
    """A chain of `items` without recursion."""
    depth = 0
    while isinstance(value, dict) and list(value) == ["items"]:
        value, depth = value["items"], depth + 1
    inner = _dumps(value) if not isinstance(value, list) else b"[" + b",".join(map(_dumps, value)) + b"]"
    return b'{"items":' * depth + inner + b"}" * depth


@pytest.mark.parametrize("prompt", [[-1] * 500_000, [1] * 400_000 + ["x"], [[1]] * 100_000 + [5]])
def test_a_wrong_list_costs_one_complaint(prompt: list[Any]) -> None:
    """Not a million: the check stops at the first wrong element, so that the loop is free again at once."""
    body = json.dumps({"prompt": prompt}).encode()
    with pytest.raises(InvalidArgument) as caught:
        parse_request(CompletionRequest, body)
    assert len(caught.value.violations) == 1
    assert len(caught.value.message) < 1_000


# --- errors ----------------------------------------------------------------------------------------------------------


def test_names_of_parameters() -> None:
    """Our paths as OpenAI's."""
    for ours, theirs in {
        "sampling.top_p": "top_p",
        "stop.stop_strings[3]": "stop",
        "structured_output.json_schema": "response_format",
        "tools[2].parameters_json": "tools[2].function.parameters",
        "tools[2].name": "tools[2].function.name",
        "messages[1].tool_calls[0].arguments": "messages[1].tool_calls[0].function.arguments",
        "messages[1].role": "messages[1].role",
        "template_arguments_json": "chat_template_kwargs",
        "labels": "metadata",
        "tool_choice.name": "tool_choice",
        "inputs[4].token_ids.ids": "input",
    }.items():
        assert param_of(ours) == theirs


def test_statuses_and_headers_of_errors() -> None:
    """HTTP statuses where a class alone does not say it, and when clients should come again."""
    assert http_status(NotFound("x", reason="RESUME_EXPIRED")) == 410
    assert http_status(NotFound("x", reason="MODEL_NOT_FOUND")) == 404
    late = error_headers(Unavailable("x", retry_after_s=0.25))
    assert late == {"retry-after": "1", "retry-after-ms": "250"}
    assert error_headers(ResourceExhausted("x", retry_after_s=2.5))["retry-after"] == "3"
    assert error_headers(AlreadyExists("x")) == {"x-should-retry": "false"}
    assert error_headers(InvalidArgument("x")) == {}
