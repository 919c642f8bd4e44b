"""What a chat's tools may be: every mistake is told with its field, before anything is rendered."""

import json
from typing import Any, get_args

import pytest
from pydantic import ValidationError

from gateway_svc.chat.conversation import template_arguments, template_messages, template_tools
from gateway_svc.chat.resolving import resolve_chat
from gateway_svc.chat.tool_calls.format_choice import AUTO, NONE, REASONING_FORMATS, FormatChoice
from gateway_svc.chat.tool_calls.tool_formats import TOOL_FORMATS
from gateway_svc.checks.validation import SamplingDefaults, check_parameters
from gateway_svc.settings import GatewaySettings
from protos.inference.v1 import inference_pb2 as pb
from svc_common.errors import InvalidArgument
from tests.support.services import models

USER = pb.Message(role="user", content="hi")
TOOL = pb.Tool(name="add", parameters_json='{"type": "object"}')
REQUIRED = pb.ToolChoice(mode=pb.TOOL_MODE_REQUIRED)
CALL = pb.ToolCall(name="add", arguments="{}")

WRONG: dict[str, tuple[dict[str, Any], list[str]]] = {
    "no name": ({"tools": [pb.Tool()]}, ["tools[0].name"]),
    "a name of other characters": ({"tools": [pb.Tool(name="gét weather")]}, ["tools[0].name"]),
    "a long name": ({"tools": [pb.Tool(name="a" * 65)]}, ["tools[0].name"]),
    "one name twice": ({"tools": [TOOL, pb.Tool(name="b"), TOOL]}, ["tools[2].name"]),
    "too many": ({"tools": [pb.Tool(name=f"t{i}") for i in range(129)]}, ["tools"]),
    "too large": ({"tools": [pb.Tool(name=f"t{i}", description="x" * 140_000) for i in range(2)]}, ["tools"]),
    "no JSON": ({"tools": [pb.Tool(name="a", parameters_json="{")]}, ["tools[0].parameters_json"]),
    "no number": ({"tools": [pb.Tool(name="a", parameters_json='{"minimum": NaN}')]}, ["tools[0].parameters_json"]),
    "half a character": (
        {"tools": [pb.Tool(name="a", parameters_json='{"title": "\\ud800"}')]},
        ["tools[0].parameters_json"],
    ),
    "nested too deeply": (
        {"tools": [pb.Tool(name="a", parameters_json='{"a":' * 30_000)]},
        ["tools[0].parameters_json"],
    ),
    "no object": ({"tools": [pb.Tool(name="a", parameters_json="[]")]}, ["tools[0].parameters_json"]),
    "no object's schema": (
        {"tools": [pb.Tool(name="a", parameters_json='{"type": "string"}')]},
        ["tools[0].parameters_json"],
    ),
    "an unknown choice": ({"tools": [TOOL], "tool_choice": pb.ToolChoice(name="sub")}, ["tool_choice.name"]),
    "a choice of nothing": ({"tool_choice": REQUIRED}, ["tool_choice.mode"]),
    "a name of nothing": ({"tool_choice": pb.ToolChoice(name="sub")}, ["tool_choice.name"]),
    "an unknown mode": ({"tool_choice": pb.ToolChoice(mode=9)}, ["tool_choice.mode"]),  # type: ignore[arg-type]
    "forced without an end": (
        {"tools": [TOOL], "tool_choice": REQUIRED, "stop": pb.StopConditions(ignore_eos=True)},
        ["stop.ignore_eos"],
    ),
    "variables that are none": ({"template_arguments_json": "3"}, ["template_arguments_json"]),
    "variables that are reserved": (
        {"template_arguments_json": '{"tools": [], "messages": 1, "add_generation_prompt": 0}'},
        ["template_arguments_json"] * 3,
    ),
    "variables that are large": (
        {"template_arguments_json": json.dumps({"a": "x" * 70_000})},
        ["template_arguments_json"],
    ),
    "a user who calls": (
        {"messages": [pb.Message(role="user", content="x", tool_calls=[CALL])]},
        ["messages[0].tool_calls"],
    ),
    "a call of nothing": (
        {"messages": [pb.Message(role="assistant", tool_calls=[CALL, pb.ToolCall()])]},
        ["messages[0].tool_calls[1].name"],
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_each_mistake_names_its_field(case: str) -> None:
    """And nothing else is complained of."""
    fields, expected = WRONG[case]
    request = pb.ChatRequest(**{"messages": [USER], **fields})
    with pytest.raises(InvalidArgument) as caught:
        check_parameters(request, models.tiny().limits)
    assert [violation.field for violation in caught.value.violations] == expected


def test_good_tools_pass() -> None:
    """Names with dots and dashes, no parameters, the most that there may be."""
    tools = [pb.Tool(name=f"a.b-c_{i}") for i in range(128)]
    check_parameters(pb.ChatRequest(messages=[USER], tools=tools, tool_choice=REQUIRED), models.tiny().limits)


def test_templates_are_told_what_there_is() -> None:
    """OpenAI's form; keys are there only where they have something; arguments are objects, as templates expect them."""
    call = pb.ToolCall(id="c1", name="add", arguments='{"a": [1, "é"]}')
    messages = [
        pb.Message(role="user", content="hi", name="ann"),
        pb.Message(role="assistant", tool_calls=[call], reasoning="hm"),
        pb.Message(role="tool", content="3", tool_call_id="c1"),
        pb.Message(role="assistant", content="I add.", tool_calls=[call], reasoning="hm"),
    ]
    function = {"name": "add", "arguments": {"a": [1, "é"]}}
    assert template_messages(messages) == [
        {"role": "user", "content": "hi", "name": "ann"},
        {
            "role": "assistant",
            "content": "",
            "reasoning_content": "hm",
            "thinking": "hm",
            "tool_calls": [{"id": "c1", "type": "function", "function": function}],
        },
        {"role": "tool", "content": "3", "tool_call_id": "c1"},
        {  # gpt-oss's template refuses thinking beside both
            "role": "assistant",
            "content": "I add.",
            "reasoning_content": "hm",
            "tool_calls": [{"id": "c1", "type": "function", "function": function}],
        },
    ]
    assert template_tools([TOOL, pb.Tool(name="b", description="d")]) == [
        {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}},
        {
            "type": "function",
            "function": {"name": "b", "description": "d", "parameters": {"type": "object", "properties": {}}},
        },
    ]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", {}),
        ("{}", {}),
        ('{"a": 1', '{"a": 1'),
        ("[1]", "[1]"),
        ("x", "x"),
        ("[" * 60_000, "[" * 60_000),
        ('{"a": "\\ud800"}', '{"a": "\\ud800"}'),
    ],
)
def test_arguments_that_are_no_object_stay_text(text: str, expected: Any) -> None:
    """A model that wrote malformed arguments once, half a character among them, must not end its conversation."""
    assert template_arguments(text) == expected


def test_half_a_character_that_a_template_writes_is_refused() -> None:
    """Jinja can write it, no tokenizer can take it."""
    text = models.TextModel(models.tiny_tokenizer(), limits=models.tiny().limits, chat_template=r"{{ '\ud800' }}")
    with pytest.raises(InvalidArgument) as caught:
        resolve_chat(pb.ChatRequest(messages=[USER]), text, text.limits, SamplingDefaults(), FormatChoice())
    assert caught.value.violations[0].field == "messages"


def test_variables_reach_the_template() -> None:
    """And win over special tokens of the same name, as in transformers."""
    text = models.TextModel(
        models.tiny_tokenizer(),
        limits=models.tiny().limits,
        chat_template="{{ style }}{{ bos_token }}{{ messages[0].content }}",
        special_tokens={"bos_token": "<s>"},
    )
    request = pb.ChatRequest(messages=[USER], template_arguments_json='{"style": "short ", "bos_token": "B"}')
    resolved = resolve_chat(request, text, text.limits, SamplingDefaults(), FormatChoice())
    assert text.decode(resolved.prompt_token_ids) == "short Bhi"


@pytest.mark.parametrize(
    ("source", "tools", "reasoning"),
    [
        ("", None, None),
        ("<tool_call> <think>", "hermes", "think"),
        ("<tool_call><function=", "qwen3-coder", None),
        ("<|python_tag|>", "llama3", None),
        ('<|start_header_id|> "parameters"', "llama3", None),
        ("[TOOL_CALLS]", "mistral", None),
        ("[TOOL_CALLS]name[ARGS]", "mistral-args", None),
    ],
)
def test_a_template_shows_its_format(source: str, tools: str | None, reasoning: str | None) -> None:
    """Unless a setting names another, or none."""
    choice = FormatChoice()
    assert getattr(choice.tools(source), "name", None) == tools
    assert getattr(choice.reasoning(source), "name", None) == reasoning
    assert FormatChoice("none", "none").tools(source) is None
    assert FormatChoice("none", "none").reasoning(source) is None
    assert getattr(FormatChoice("mistral", "think").tools(source), "name", None) == "mistral"


def test_unknown_formats_are_refused_with_those_that_there_are() -> None:
    """As settings, before anything starts."""
    with pytest.raises(ValidationError, match=r"Input should be 'auto', 'none', 'hermes', .* or 'functiongemma'"):
        GatewaySettings.model_validate({"tool_parser": "herems"})
    with pytest.raises(ValidationError, match=r"Input should be 'auto', 'none', 'think', .* or 'harmony'"):
        GatewaySettings.model_validate({"reasoning_parser": "thinking"})


@pytest.mark.parametrize(
    ("setting", "formats"), [("tool_parser", TOOL_FORMATS), ("reasoning_parser", REASONING_FORMATS)]
)
def test_the_settings_name_every_format(setting: str, formats: dict[str, object]) -> None:
    """A new format is a name in the settings too."""
    assert get_args(GatewaySettings.model_fields[setting].annotation) == (AUTO, NONE, *formats)
