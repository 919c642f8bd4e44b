"""What a Messages body becomes, and what is refused under which name. Pure."""

import json
from typing import Any

import pytest

from gateway_svc.anthropic.message_request import CountTokensBody, MessageBody
from gateway_svc.anthropic.thinking import signature_of
from gateway_svc.http.anthropic_errors import error_body
from protos.inference.v1 import inference_pb2 as pb
from svc_common.errors import AlreadyExists, InvalidArgument, OutOfRange, QuireError, Unavailable

SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
WEATHER = {
    "name": "weather",
    "description": "d",
    "input_schema": SCHEMA,
    "strict": True,
    "cache_control": {"type": "ephemeral"},
}
USER = {"role": "user", "content": "hi"}
CACHED = {"type": "ephemeral", "ttl": "1h"}


def chat(**fields: Any) -> pb.ChatRequest:
    """The message that a body of these fields becomes."""
    body = {"model": "tiny", "max_tokens": 9, "messages": [USER], **fields}
    return MessageBody.parse(json.dumps(body).encode()).chat_request()


def text(words: str, **more: Any) -> dict[str, Any]:
    """A text block."""
    return {"type": "text", "text": words, **more}


def turns_of(request: pb.ChatRequest) -> list[tuple[str, str]]:
    """Roles and texts."""
    return [(message.role, message.content) for message in request.messages]


def test_a_round_with_tools() -> None:
    """System, blocks, thinking, calls and results; several results are messages of their own, before the text behind them."""
    use = {"type": "tool_use", "id": "toolu_abc123def", "name": "weather", "input": {"city": "Zürich"}}
    other = {**use, "id": "foreign", "input": {}}
    result = {"type": "tool_result", "tool_use_id": "toolu_abc123def", "content": [text("7"), text("degrees")]}
    failed = {"type": "tool_result", "tool_use_id": "foreign", "content": "no such city", "is_error": True}
    request = chat(
        system=[text("be", cache_control=CACHED), text("kind")],
        messages=[
            USER,
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "hm", "signature": "s"},
                    {"type": "redacted_thinking", "data": "x"},
                    text("Let me see."),
                    use,
                    other,
                ],
            },
            {"role": "user", "content": [result, failed, {"type": "tool_result", "tool_use_id": "z"}, text("well?")]},
        ],
        tools=[WEATHER, {"type": "custom", "name": "time", "input_schema": {}}],
        tool_choice={"type": "auto", "disable_parallel_tool_use": True},
        cache_control=CACHED,
    )
    assert turns_of(request) == [
        ("system", "be\nkind"),
        ("user", "hi"),
        ("assistant", "Let me see."),
        ("tool", "7\ndegrees"),
        ("tool", "Error: no such city"),
        ("tool", ""),
        ("user", "well?"),
    ]
    assistant = request.messages[2]
    assert assistant.reasoning == "hm"
    calls = [(call.id, call.name, call.arguments) for call in assistant.tool_calls]
    assert calls == [("abc123def", "weather", '{"city":"Zürich"}'), ("foreign", "weather", "{}")]
    assert [message.tool_call_id for message in request.messages[3:6]] == ["abc123def", "foreign", "z"]
    assert [(tool.name, tool.parameters_json) for tool in request.tools] == [
        ("weather", json.dumps(SCHEMA, separators=(",", ":"))),
        ("time", ""),
    ]
    assert (request.tool_choice.mode, request.parallel_tool_calls) == (pb.TOOL_MODE_AUTO, False)
    assert not request.continue_final_message


def test_adjacent_messages_of_a_role_are_one_turn() -> None:
    """As Anthropic's API says; a system message in between stays in its place."""
    request = chat(
        messages=[
            USER,
            {"role": "user", "content": [text("again"), text("and again")]},
            {"role": "assistant", "content": "one"},
            {"role": "assistant", "content": [text("two")]},
            {"role": "system", "content": "be brief"},
            USER,
        ]
    )
    assert turns_of(request) == [
        ("user", "hi\nagain\nand again"),
        ("assistant", "one\ntwo"),
        ("system", "be brief"),
        ("user", "hi"),
    ]


def test_an_answer_that_is_begun() -> None:
    """A last message of the assistant's is continued, unless it ends with a call."""
    assert chat(messages=[USER, {"role": "assistant", "content": "The answer is"}]).continue_final_message
    use = {"type": "tool_use", "id": "a", "name": "weather", "input": {}}
    with pytest.raises(InvalidArgument, match=r"messages\[1\]: ends with tool_use"):
        chat(messages=[USER, {"role": "assistant", "content": [text("x"), use]}])


def test_parameters() -> None:
    """Each under our own name; what is left out stays absent."""
    request = chat(
        temperature=0.5,
        top_p=0.9,
        top_k=40,
        stop_sequences=["a", "b"],
        seed=-1,
        priority=2,
        cache_salt="s",
        metadata={"user_id": "u"},
        service_tier="auto",
        inference_geo="eu",
        something_new={"x": 1},
    )
    assert request.model == "tiny"
    assert (request.sampling.temperature, request.sampling.top_k) == (0.5, 40)
    assert request.sampling.seed == 2**64 - 1
    assert (request.stop.max_tokens, list(request.stop.stop_strings)) == (9, ["a", "b"])
    assert (request.scheduling.priority, request.cache.cache_salt) == (2, "s")
    bare = chat()
    assert (
        not bare.sampling.ListFields() and not bare.HasField("parallel_tool_calls") and not bare.template_arguments_json
    )


@pytest.mark.parametrize(
    ("choice", "expected"),
    [
        ({"type": "any"}, pb.ToolChoice(mode=pb.TOOL_MODE_REQUIRED)),
        ({"type": "none"}, pb.ToolChoice(mode=pb.TOOL_MODE_NONE)),
        ({"type": "tool", "name": "weather"}, pb.ToolChoice(name="weather")),
    ],
)
def test_tool_choices(choice: dict[str, Any], expected: pb.ToolChoice) -> None:
    """Each of Anthropic's kinds."""
    assert chat(tools=[WEATHER], tool_choice=choice).tool_choice == expected


VARIABLES: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"thinking": {"type": "disabled"}}, {"enable_thinking": False, "thinking": False}),
    ({"thinking": {"type": "adaptive", "display": "omitted"}}, {"enable_thinking": True, "thinking": True}),
    (
        {"thinking": {"type": "enabled", "budget_tokens": 2048}},
        {"enable_thinking": True, "thinking": True, "thinking_budget": 2048},
    ),
    ({"output_config": {"effort": "low"}}, {"reasoning_effort": "low"}),
    (
        {"thinking": {"type": "disabled"}, "chat_template_kwargs": {"thinking": True, "x": 1}},
        {"enable_thinking": False, "thinking": True, "x": 1},
    ),
]


@pytest.mark.parametrize(("fields", "expected"), VARIABLES)
def test_thinking_is_the_templates(fields: dict[str, Any], expected: dict[str, Any]) -> None:
    """Under the names that templates use; the request's own variables take precedence."""
    assert json.loads(chat(**fields).template_arguments_json) == expected


@pytest.mark.parametrize("words", ["", "I should look; Zürich?", "🙂" * 50])
def test_thinking_that_was_omitted_comes_back(words: str) -> None:
    """By its signature; one that names a shown text, or is of another server, carries none."""
    carried = {"type": "thinking", "thinking": "", "signature": signature_of(words, carries=True)}
    turns = [USER, {"role": "assistant", "content": [carried, text("x")]}, USER]
    assert chat(messages=turns).messages[1].reasoning == words
    for signature in (signature_of(words, carries=False), "ErUBk", "text.!", "text./w=="):
        carried["signature"] = signature
        assert chat(messages=turns).messages[1].reasoning == ""


def test_a_schema() -> None:
    """The answer's text by output_config."""
    request = chat(output_config={"format": {"type": "json_schema", "schema": SCHEMA}})
    assert json.loads(request.json_schema) == SCHEMA


def test_counted_is_what_would_be_sent() -> None:
    """The same prompt, without the fields that count_tokens does not have."""
    fields = {"model": "m", "messages": [USER], "system": "s", "tools": [WEATHER], "thinking": {"type": "disabled"}}
    counted = CountTokensBody.parse(json.dumps(fields).encode()).chat_request()
    sent = chat(**fields)
    sent.ClearField("stop")
    for empty in ("sampling", "scheduling", "cache"):
        sent.ClearField(empty)
    assert counted == sent


def block(kind: str, **fields: Any) -> dict[str, Any]:
    """A user's message with that block behind a text."""
    return {"messages": [USER, {"role": "user", "content": [text("x"), {"type": kind, **fields}]}]}


def answered(kind: str, **fields: Any) -> dict[str, Any]:
    """An assistant's message with that block."""
    return {"messages": [USER, {"role": "assistant", "content": [{"type": kind, **fields}]}, USER]}


SOURCE = {"type": "base64", "media_type": "image/png", "data": "aGk="}
RESULT = {"tool_use_id": "a", "content": [{"type": "image", "source": SOURCE}]}
REFUSED: list[tuple[dict[str, Any], str]] = [
    (block("image", source=SOURCE), "messages[1].content[1]: is of type image"),
    (block("document", source=SOURCE), "messages[1].content[1]: is of type document"),
    (block("search_result"), "messages[1].content[1]: is of type search_result"),
    (block("secret"), "messages[1].content[1]: is of an unknown type"),
    (
        block("tool_use", id="a", name="b", input={}),
        "messages[1].content[1]: is of type tool_use, which a message of role user",
    ),
    (block("tool_result"), "messages[1].content[1].tool_use_id: is missing"),
    (block("tool_result", **RESULT), "messages[1].content[1].content[0]: is of type image"),
    (block("tool_result", tool_use_id="a", content=5), "messages[1].content[1].content: must be a text or"),
    (block("tool_result", tool_use_id="a", content=["x"]), "messages[1].content[1].content[0]: must be a text block"),
    (block("text"), "messages[1].content[1].text: is missing"),
    (block("text", text=5), "messages[1].content[1].text: Input should be a valid string"),
    ({"messages": [{"role": "user", "content": [{"text": "x"}]}]}, "messages[0].content[0].type: Field required"),
    ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content: Input should be a valid list"),
    (
        {"messages": [{"role": "tool", "content": "x"}]},
        "messages[0].role: Input should be 'user', 'assistant' or 'system'",
    ),
    (
        answered("tool_result", tool_use_id="a"),
        "messages[1].content[0]: is of type tool_result, which a message of role assistant",
    ),
    (
        answered("server_tool_use", id="a", name="web_search", input={}),
        "messages[1].content[0]: is of type server_tool_use",
    ),
    (answered("tool_use", id="a", name="", input={}), "messages[1].content[0].name: is missing"),
    (answered("thinking"), "messages[1].content[0].thinking: is missing"),
    ({"system": [{"type": "image"}]}, "system: Input should be a valid string"),
    ({"max_tokens": None}, "max_tokens: Input should be a valid integer"),
    ({"max_tokens": 0}, "max_tokens: is 0"),
    (
        {"tools": [{"type": "web_search_20250305", "name": "web_search"}]},
        "tools[0].type: is that of a tool of Anthropic's",
    ),
    ({"tools": [{"name": "x"}]}, "tools[0].input_schema: is missing"),
    ({"tools": [{**WEATHER, "defer_loading": True}]}, "tools[0].defer_loading: needs a tool that searches"),
    ({"tools": [{**WEATHER, "input_examples": [{"city": "x"}]}]}, "tools[0].input_examples: has no place"),
    ({"tool_choice": {"type": "any"}}, "tool_choice: is 'any', and there are no tools"),
    ({"tools": [WEATHER], "tool_choice": {"type": "tool"}}, "tool_choice.name: is missing"),
    ({"thinking": {"type": "between_tools"}}, "thinking: Input should be 'enabled', 'adaptive' or 'disabled'"),
    ({"mcp_servers": [{"type": "url"}]}, "mcp_servers: this value is not supported by this server; send tools"),
    ({"container": "c"}, "container: this value is not supported"),
    ({"context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]}}, "context_management: this value"),
    (
        {"response_format": {"type": "json_object"}},
        "response_format: this value is not supported by this server; send output_config",
    ),
    ({"stop": "x"}, "stop: this value is not supported by this server; send stop_sequences"),
]


@pytest.mark.parametrize(("fields", "message"), REFUSED, ids=[message.partition(":")[0] for _, message in REFUSED])
def test_what_is_refused(fields: dict[str, Any], message: str) -> None:
    """By the field's place, in Anthropic's form; nothing of the content is quoted."""
    with pytest.raises(InvalidArgument) as caught:
        chat(**fields)
    body = error_body(caught.value, "r-1")
    assert body["error"]["message"].startswith(message)
    assert (body["type"], body["error"]["type"], body["request_id"]) == ("error", "invalid_request_error", "r-1")


@pytest.mark.parametrize(
    "fields",
    [
        {"context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}},
        {"mcp_servers": []},
        {"n": 1},
        {"thread": None},
        {"stop": []},
    ],
)
def test_values_without_effect(fields: dict[str, Any]) -> None:
    """Are accepted."""
    assert chat(**fields) == chat()


def test_threads() -> None:
    """Refused by the code on which Anthropic's packages send the whole conversation."""
    with pytest.raises(InvalidArgument) as caught:
        chat(thread={"type": "create"})
    assert error_body(caught.value, "")["error"]["details"] == {"error_code": "thread_unsupported_request"}


ERRORS: list[tuple[QuireError, str, str]] = [
    (
        InvalidArgument.field("stop.stop_strings", "has too many"),
        "invalid_request_error",
        "stop_sequences: has too many",
    ),
    (InvalidArgument.field("sampling.top_p", "is 7"), "invalid_request_error", "top_p: is 7"),
    (InvalidArgument.field("tools[1].parameters_json", "no"), "invalid_request_error", "tools[1].input_schema: no"),
    (InvalidArgument.field("json_schema", "no"), "invalid_request_error", "output_config.format.schema: no"),
    (InvalidArgument.field("continue_final_message", "no"), "invalid_request_error", "messages: no"),
    (AlreadyExists("x", reason="REQUEST_ID_IN_USE"), "conflict_error", "x"),
    (Unavailable("x", reason="NO_WORKER"), "overloaded_error", "x"),
    (
        OutOfRange("x", reason="PROMPT_TOO_LONG", metadata={"prompt_tokens": "9", "limit": "5"}),
        "invalid_request_error",
        "prompt is too long: 9 tokens > 5 maximum",
    ),
]


@pytest.mark.parametrize(("error", "kind", "message"), ERRORS, ids=[message for _, _, message in ERRORS])
def test_errors_in_anthropics_words(error: QuireError, kind: str, message: str) -> None:
    """Types and names of fields."""
    told = error_body(error, "")
    assert (told["error"]["type"], told["error"]["message"], told["request_id"]) == (kind, message, None)
