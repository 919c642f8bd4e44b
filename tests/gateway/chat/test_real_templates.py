"""Chat templates of real models, as a package brings them: rendered as transformers does, and what they write is read back.

A model learns its markup from its template. So a conversation with calls is rendered, and what the template writes after the prompt
is given to the parsers that the gateway chooses for this template.
"""

import json
from collections.abc import Iterator
from typing import Any

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from gateway_svc.chat.conversation import template_messages
from gateway_svc.chat.parsing import ChatParsing
from gateway_svc.chat.tool_calls.format_choice import FormatChoice
from gateway_svc.chat.tool_calls.parameter_types import parameter_types
from gateway_svc.text.chat_template import ChatTemplate
from svc_common.errors import InvalidArgument
from tests.gateway.text.chat_families import as_request
from tests.support.client_tools import tool_files
from tests.support.services.call_writers import TOOLS
from tests.support.services.chat_outputs import parsed

pytestmark = pytest.mark.long

SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}
OFFERED = [
    {"type": "function", "function": {"name": name, "description": "It does.", "parameters": TOOLS[name]}}
    for name in ("get_weather", "ns.write-file")
]
CALLS = [
    ("get_weather", {"city": 'Zürich, "x" <b>', "days": 3, "is_metric": True}),
    ("ns.write-file", {"path": "b/c", "content": "one\ntwo"}),
]
THOUGHT, ANSWER = "I think so.", "The answer."
MODES: tuple[dict[str, Any], ...] = ({}, {"enable_thinking": True}, {"enable_thinking": False}, {"thinking": True})
ONE_CALL_ONLY = {"llama3_1", "llama3_2", "gptoss"}
# The template takes arguments as JSON text, shows no calls, or leaves out of the history what the prompt opened.
UNLIKE_THE_OUTPUT = {"deepseekv3", "deepseek_r1_distill", "lfm2"}


@pytest.fixture(scope="module")
def templates() -> dict[str, str]:
    """Sources by name; those changed for training are left out."""
    folder = tool_files("templates") / "trl" / "chat_templates"
    found = {path.stem: path.read_text(encoding="utf-8") for path in sorted(folder.glob("*.jinja"))}
    return {name: source for name, source in found.items() if not name.endswith("_training")}


def assistant(calls: list[Any], thought: str) -> dict[str, Any]:
    """An assistant's message."""
    message: dict[str, Any] = {"role": "assistant", "content": "" if calls else ANSWER}
    if calls:
        message["tool_calls"] = [
            {"id": f"call0000{i}", "type": "function", "function": {"name": name, "arguments": arguments}}
            for i, (name, arguments) in enumerate(calls)
        ]
    return message | ({"reasoning_content": thought} if thought else {})


def outputs(
    template: ChatTemplate, answer: dict[str, Any], tools: list[dict[str, Any]] | None
) -> Iterator[tuple[str, str]]:
    """Prompt, and what the template writes after it for `answer`, in each of the modes in which that is an output."""
    asked = [{"role": "user", "content": "Hi there"}]
    for mode in MODES:
        prompt = template.render(asked, tools=tools, variables=mode)
        messages = template_messages(as_request([*asked, answer], [], {}).messages)
        whole = template.render(messages, tools=tools, variables=mode, add_generation_prompt=False)
        if whole.startswith(prompt) and answer.get("reasoning_content", "") in whole:
            yield prompt, whole.removeprefix(prompt)


def read(source: str, prompt: str, output: str, tools: list[dict[str, Any]] | None) -> tuple[list[Any], str, str]:
    """Calls, reasoning and content of an output, read at every character and as a whole."""
    choice, types = FormatChoice(), {}
    calls, reasoning = (choice.tools(source) if tools else None), choice.reasoning(source)
    if calls is not None and calls.syntax.parameter is not None:
        types = {tool["function"]["name"]: parameter_types(tool["function"]["parameters"]) for tool in OFFERED}
    parsing = ChatParsing(
        tool_format=calls.name if calls else "none",
        tool_names=tuple(tool["function"]["name"] for tool in tools or ()),
        reasoning_format=reasoning.name if reasoning else "none",
        reasoning_open=reasoning is not None and reasoning.is_open(prompt),
        call_salt="salt",
        tool_types=types,
    )
    parts = parsed(parsing.parser, list(output))
    assert parsed(parsing.parser, [output]) == parts
    texts = {kind: "".join(text for part, _, text in parts if part == kind) for kind in ("reasoning", "content")}
    found = [(name.split(":", 1)[1], json.loads(text)) for kind, name, text in parts if kind == "call"]
    return found, texts["reasoning"].strip(), texts["content"].strip()


def test_what_a_template_writes_is_read(templates: dict[str, str], record_property: Any) -> None:
    """Calls and reasoning of each family with a format; its content holds no more than the end of the turn."""
    num_outputs = 0
    with_calls = {name: source for name, source in templates.items() if FormatChoice().tools(source)}
    for name, source in with_calls.items():
        template, seen = ChatTemplate(source, SPECIAL), 0
        for calls, thought in [(CALLS[:1], ""), (CALLS[1:], THOUGHT), (CALLS, "")]:
            if name in UNLIKE_THE_OUTPUT or (len(calls) > 1 and name in ONE_CALL_ONLY):
                continue
            for prompt, output in outputs(template, assistant(calls, thought), OFFERED):
                found, reasoning, content = read(source, prompt, output, OFFERED)
                assert (found, reasoning) == (calls, thought), (name, output)
                assert len(content) <= len("<|tool_response>"), (name, content)
                seen += 1
        assert seen or name in UNLIKE_THE_OUTPUT, name
        num_outputs += seen
    record_property("size", f"{num_outputs} outputs with calls of {len(with_calls)} templates")
    assert len(with_calls) > 25


def test_what_a_template_writes_of_reasoning_is_read(templates: dict[str, str], record_property: Any) -> None:
    """Without tools: reasoning and answer apart."""
    families = set()
    for name, source in templates.items():
        if FormatChoice().reasoning(source) is None:
            continue
        for prompt, output in outputs(ChatTemplate(source, SPECIAL), assistant([], THOUGHT), None):
            _, reasoning, content = read(source, prompt, output, None)
            assert reasoning == THOUGHT and content.startswith(ANSWER), (name, output)
            assert len(content) <= len(ANSWER + "<｜end▁of▁sentence｜>"), (name, content)
            families.add(name)
    record_property("size", f"{len(families)} templates with reasoning")
    assert len(families) > 12


def test_templates_render_as_in_transformers(templates: dict[str, str], record_property: Any) -> None:
    """Text for text; what one refuses the other refuses."""
    num_equal = 0
    asked = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "Hi there"}]
    for name, source in templates.items():
        template = ChatTemplate(source, SPECIAL)
        for messages in (asked, [*asked[1:], assistant(CALLS[:1], THOUGHT)], [*asked, assistant([], "")]):
            for tools in (None, OFFERED):
                given: dict[str, Any] = {"add_generation_prompt": messages[-1]["role"] == "user", "tools": tools}
                try:
                    [want], _ = render_jinja_template([messages], chat_template=source, **given, **SPECIAL)
                except Exception:
                    with pytest.raises(InvalidArgument):
                        template.render(messages, **given)
                else:
                    ours = template_messages(as_request(messages, [], {}).messages)
                    assert template.render(ours, **given) == want, name
                    num_equal += 1
    record_property("size", f"{num_equal} renderings of {len(templates)} templates")
    assert num_equal > 4 * len(templates)
