"""Forced calls: the grammar admits exactly the format's syntax with arguments that fit, whatever the model would like."""

import functools
import json
import random
import re
from collections.abc import Callable, Sequence
from typing import Any

import jsonschema
import numpy as np
import pytest

from gateway_svc.chat.parsing import ChatParsing
from gateway_svc.chat.resolving import resolve_chat
from gateway_svc.chat.tool_calls.format_choice import FormatChoice
from gateway_svc.chat.tool_calls.tool_formats import TOOL_FORMATS
from gateway_svc.checks.validation import ResolvedRequest, SamplingDefaults, check_parameters
from gateway_svc.text.text_model import TextModel
from protos.common.v1 import common_pb2
from protos.inference.v1 import inference_pb2 as pb
from svc_common.errors import InvalidArgument
from svc_common.grammars import GrammarCompiler
from tests.gateway.chat.test_chat_events import hear, with_special
from tests.support.services import models
from tests.support.services.call_writers import WRITERS
from tests.support.services.chat_outputs import cut, parsed

SCHEMAS: dict[str, dict[str, Any]] = {
    "get_weather": {
        "type": "object",
        "properties": {
            "city": {"enum": ["Paris", 'Z"ü rich', "</tool_call>"]},
            "days": {"type": "integer", "minimum": 1, "maximum": 14},
        },
        "required": ["city", "days"],
        "additionalProperties": False,
    },
    "get": {
        "$defs": {
            "p": {
                "type": "object",
                "properties": {"x": {"type": "boolean"}},
                "required": ["x"],
                "additionalProperties": False,
            }
        },
        "type": "object",
        "properties": {"points": {"type": "array", "items": {"$ref": "#/$defs/p"}, "minItems": 1, "maxItems": 3}},
        "required": ["points"],
        "additionalProperties": False,
    },
    "get_weather.v2": {
        "properties": {"code": {"type": "string", "pattern": "^[A-Z]{3}$"}},
        "required": ["code"],
        "additionalProperties": False,
    },
}
LIMITS = models.tiny().limits


def chat(
    *, mode: Any = pb.TOOL_MODE_REQUIRED, name: str = "", tools: Sequence[str] = tuple(SCHEMAS), **fields: Any
) -> pb.ChatRequest:
    choice = pb.ToolChoice(name=name) if name else pb.ToolChoice(mode=mode)
    made = [pb.Tool(name=tool, description="d", parameters_json=json.dumps(SCHEMAS[tool])) for tool in tools]
    return pb.ChatRequest(messages=[pb.Message(role="user", content="hi")], tools=made, tool_choice=choice, **fields)


def resolved(
    request: pb.ChatRequest, text: TextModel, tool_parser: str = "auto", reasoning: str = "auto"
) -> ResolvedRequest:
    check_parameters(request, LIMITS)
    return resolve_chat(request, text, LIMITS, SamplingDefaults(), FormatChoice(tool_parser, reasoning))


@functools.cache
def model(template: str = "", *special: str) -> TextModel:
    """The built-in tokenizer with another template and with special tokens."""
    made = with_special(*special)
    return TextModel(made._tokenizer, limits=LIMITS, chat_template=template or models.tiny().chat_template)


@functools.cache
def compiler_of(text: TextModel) -> GrammarCompiler:
    return GrammarCompiler(text._tokenizer.to_str().encode(), [0, 1], text._tokenizer.get_vocab_size())


def random_output(text: TextModel, grammar: common_pb2.Grammar, rng: random.Random) -> list[int]:
    """Tokens drawn from what the grammar allows, to its end: evenly, but markers and the end as often as all others together."""
    tokenizer, compiler = text._tokenizer, compiler_of(text)
    special = {token_id for token_id, token in tokenizer.get_added_tokens_decoder().items() if token.special}
    matcher, ids = compiler.compile(grammar), []
    while not matcher.is_stopped():
        bits = np.unpackbits(np.frombuffer(matcher.compute_bitmask(), np.uint8), bitorder="little")
        allowed = np.flatnonzero(bits[: tokenizer.get_vocab_size()]).tolist()
        marked = [token_id for token_id in allowed if token_id in special]
        ids.append(rng.choice(marked if marked and rng.random() < 0.5 else allowed))
        assert matcher.consume_token(ids[-1])
    return ids if ids[-1] in (0, 1) else [*ids, 0]


SPECIAL = {
    "deepseek-v3": tuple(
        f"<｜tool▁{text}｜>" for text in ("calls▁begin", "calls▁end", "call▁begin", "call▁end", "sep")
    ),
    "kimi-k2": (
        *("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),
        *("<|tool_call_begin|>", "<|tool_call_end|>", "<|tool_call_argument_begin|>"),
    ),
    "step3": ("</steptml:parameter>",),
    "harmony": ("<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|constrain|>"),
    "command": ("<|START_ACTION|>", "<|END_ACTION|>", "<|START_RESPONSE|>", "<|END_RESPONSE|>"),
    "granite": ("<|tool_call|>",),
    "gemma4": ("<|tool_call>", "<tool_call|>", '<|"|>'),
    "glm": ("<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
}
CASES: dict[str, tuple[str, tuple[str, ...]]] = {
    "hermes": ("hermes", ()),
    "hermes, special": ("hermes", ("<tool_call>", "</tool_call>")),
    "llama3": ("llama3", ("<|python_tag|>",)),
    "mistral": ("mistral", ("[TOOL_CALLS]",)),
    "mistral as text": ("mistral", ()),
    "mistral-args": ("mistral-args", ("[TOOL_CALLS]", "[ARGS]")),
    "thinking": ("hermes", ("<think>", "</think>")),
    **{name: (name, ()) for name in TOOL_FORMATS if name not in ("hermes", "llama3", "mistral", "mistral-args")},
    **{f"{name}, special": (name, special) for name, special in SPECIAL.items()},
}


OTHERS = ("harmony, special", "qwen3-coder", "command, special", "gemma4, special")
REASONING = {"thinking": "think", "harmony, special": "harmony"}


@pytest.mark.parametrize("case", CASES)
def test_random_outputs_are_calls_that_fit(case: str) -> None:
    """Tokens drawn blindly from the masks: only calls come out, of the tools there are, with arguments that validate."""
    name, special = CASES[case]
    text = model("", *special)
    found = resolved(chat(parallel_tool_calls=case != "llama3"), text, name, REASONING.get(case, "none"))
    assert found.parsing is not None
    assert found.parsing.tool_format == name
    for seed in range(2):
        ids = random_output(text, found.sampling.grammar, random.Random(seed))
        heard, _, _ = hear(ids, how=found.parsing, model=text)
        calls = [(name.partition(":")[2], shown) for kind, name, shown in heard.parts if kind == "call"]
        assert 1 <= len(calls) <= (1 if case == "llama3" else 128)
        assert heard.finished == pb.Finished(reason=common_pb2.FINISH_REASON_TOOL_CALLS)
        assert not [part for part in heard.parts if part[0] == "content"]
        for tool, arguments in calls:
            jsonschema.validate(json.loads(arguments), SCHEMAS[tool])


class PlainJson(random.Random):
    """Always the first choice, which is plain JSON."""

    def choice(self, seq: Any) -> Any:
        """The first."""
        return seq[0]

    def random(self) -> float:
        """Never below a chance of a half."""
        return 0.9


def random_schema(rng: random.Random, depth: int, strings: dict[str, Any]) -> dict[str, Any]:
    """Schema of a value; `strings`: of its texts."""
    kind = rng.randrange(8 if depth else 6)
    if kind == 6:
        return {"type": "array", "items": random_schema(rng, depth - 1, SHORT), "maxItems": 2}
    if kind == 7:
        return random_object(rng, depth - 1, SHORT)
    return [
        {"type": "string", **strings},
        {"enum": ["a", 1, None, 'b"\n', "</parameter>"]},
        {"type": "integer", "minimum": -3, "maximum": 99},
        {"type": "boolean"},
        {"type": ["string", "null"], "maxLength": 2},
        {"type": "string", "pattern": "^[<>{}()|]{2}$"} if strings else {"enum": ["x", "y z"]},
    ][kind]


SHORT = {"maxLength": 4}


def random_object(rng: random.Random, depth: int, strings: dict[str, Any]) -> dict[str, Any]:
    """Schema of an object with up to four properties, some required."""
    keys = rng.sample(["a", "b c", "name", "é", "arguments", "x-y"], rng.randint(0, 4))
    return {
        "type": "object",
        "properties": {key: random_schema(rng, depth, strings) for key in keys},
        "required": [key for key in keys if rng.random() < 0.5],
        "additionalProperties": False,
    }


def check_random_schemas(name: str, rng: random.Random, most_splits: int) -> tuple[int, int]:
    """Draw an output from the grammar of random tools, whose calls are parsed back and fit, however the output is split.

    Returns the numbers of calls and of splits.
    """
    special = rng.choice(((), SPECIAL.get(name, ())))
    text = model("", *special)
    # Free text in tags ends where a random token is the closing marker.
    is_free = TOOL_FORMATS[name].syntax.parameter is not None and any(marker.startswith("</") for marker in special)
    schemas = {tool: random_object(rng, 2, {} if is_free else SHORT) for tool in ("get", "get_2", "x.y-z")}
    request = chat(tools=())
    for tool, schema in schemas.items():
        request.tools.add(name=tool, parameters_json=json.dumps(schema))
    found = resolved(request, text, name, "none")
    assert found.parsing is not None
    ids = random_output(text, found.sampling.grammar, rng)
    heard, _, _ = hear(ids, how=found.parsing, model=text)
    assert {kind for kind, _, _ in heard.parts} == {"call"}
    for _, tool, arguments in heard.parts:
        jsonschema.validate(json.loads(arguments), schemas[tool.partition(":")[2]])
    output = text.decode(ids[:-1], special_tokens=True)
    places = rng.sample(range(len(output)), min(len(output), most_splits))
    for pieces in (list(output), *(cut(output, [place]) for place in places)):
        assert parsed(found.parsing.parser, pieces) == heard.parts, pieces
    return len(heard.parts), len(places) + 1


@pytest.mark.parametrize("name", TOOL_FORMATS)
def test_forced_calls_of_random_schemas_are_parsed_back(name: str, record_property: Any) -> None:
    """What the grammar allows, the format's parser reads as that call, also from a stream."""
    num_calls, num_splits = check_random_schemas(name, random.Random(name), 10)
    record_property("size", f"{num_calls} calls of 1 of 50 outputs, {num_splits} splits")


@pytest.mark.long
@pytest.mark.parametrize("name", TOOL_FORMATS)
def test_forced_calls_of_many_random_schemas_are_parsed_back(name: str, record_property: Any) -> None:
    """The same for many, each cut once at up to 20 places."""
    rng = random.Random(f"{name}, many")
    num_calls, num_splits = map(sum, zip(*(check_random_schemas(name, rng, 20) for _ in range(50)), strict=True))
    record_property("size", f"{num_calls} calls of 50 of 50 outputs, {num_splits} splits")


TAGS = {
    "get": {
        "type": "object",
        "properties": {
            "text": {"type": "string", "description": "free"},
            "unit": {"enum": ["a", "b c\n"]},
            "count": {"type": "integer"},
            "more": {"type": "object", "properties": {"x": {"type": "boolean"}}, "additionalProperties": False},
        },
        "required": ["text", "count"],
    }
}


@pytest.mark.parametrize("name", [name for name, found in TOOL_FORMATS.items() if found.syntax.parameter is not None])
def test_forced_parameters_stand_in_the_formats_tags(name: str) -> None:
    """What the family's template writes is what the grammar allows, and no object in its place."""
    text, request = model(), chat(tools=())
    request.tools.add(name="get", parameters_json=json.dumps(TAGS["get"]))
    found = resolved(request, text, name, "none")
    assert found.parsing is not None
    compiler, parser = compiler_of(text), found.parsing.parser

    def is_allowed(arguments: dict[str, Any]) -> bool:
        written = WRITERS[name]([("get", arguments)], PlainJson())
        ids = compiler.encode(written)
        allowed = compiler.compile(found.sampling.grammar).validate_tokens(ids) == len(ids)
        ((_, _, read),) = parsed(parser, [written])
        assert not allowed or json.loads(read) == arguments
        return allowed

    assert is_allowed({"text": 'Zürich "\\\n<x>\n', "unit": "b c\n", "count": 3, "more": {"x": True}})
    assert is_allowed({"text": "", "count": -1})
    assert not is_allowed({"text": "", "unit": "c", "count": 3})
    assert not is_allowed({"text": "x"})
    assert not is_allowed({"text": "x", "count": "3 4"})


ANSWER = {
    "type": "object",
    "properties": {"number": {"type": "integer"}, "name": {"enum": ["get", "no tool"]}},
    "required": ["number", "name"],
    "additionalProperties": False,
}
ANSWERS: dict[str, tuple[dict[str, Any], Callable[[str], object]]] = {
    "schema": ({"json_schema": json.dumps(ANSWER)}, lambda text: jsonschema.validate(json.loads(text), ANSWER)),
    "regex": ({"regex": r"(yes|no)[/\\n]{2}\/[0-9]"}, lambda text: re.fullmatch(r"(yes|no)[/\\n]{2}/[0-9]", text)),
    "choice": ({"choice": pb.ChoiceList(choices=["<tool>", 'a "b"', "{"])}, ["<tool>", 'a "b"', "{"].index),
    "lark": ({"lark": 'start: A "}" // }\nA: /x{1,3}/'}, lambda text: re.fullmatch("x{1,3}}", text)),
}


@pytest.mark.parametrize("kind", ANSWERS)
@pytest.mark.parametrize(
    "case", ["hermes", "hermes, special", "llama3", "mistral", "mistral as text", "mistral-args", "thinking", *OTHERS]
)
def test_tools_beside_structured_output_are_calls_or_an_answer(case: str, kind: str) -> None:
    """Tokens drawn blindly: either calls that fit or an answer that does, both are reached, and the parser tells them apart."""
    name, special = CASES[case]
    fields, check = ANSWERS[kind]
    text = model("", *special)
    found = resolved(chat(mode=pb.TOOL_MODE_AUTO, **fields), text, name, REASONING.get(case, "none"))
    assert found.parsing is not None
    assert ChatParsing.from_json(found.parsing.to_json()) == found.parsing
    reached: set[int] = set()
    for seed in range(40):
        heard, _, _ = hear(
            random_output(text, found.sampling.grammar, random.Random(seed)), how=found.parsing, model=text
        )
        assert heard.finished is not None
        kinds = {kind for kind, _, _ in heard.parts} - {"reasoning"}
        assert kinds in ({"call"}, {"content"})
        for shown, tool, arguments in heard.parts:
            if shown == "call":
                jsonschema.validate(json.loads(arguments), SCHEMAS[tool.partition(":")[2]])
            elif shown == "content":
                assert check(arguments) is not None or kind == "schema"
        called = kinds == {"call"}
        expected = common_pb2.FINISH_REASON_TOOL_CALLS if called else common_pb2.FINISH_REASON_STOP
        assert heard.finished.reason == expected
        reached.add(expected)
        if len(reached) == 2:
            return
    raise AssertionError(f"only {reached} came")


def test_an_answer_may_speak_of_calls() -> None:
    """What stands in an answer's texts is no call, whatever it looks like."""
    found = resolved(chat(mode=pb.TOOL_MODE_AUTO, regex=".*\\n.*"), model()).parsing
    assert found is not None
    text = 'so: <tool_call>\n{"name": "get", "arguments": {"points": []}}\n</tool_call>'
    assert parsed(found.parser, list(text)) == [("content", "", text)]
    assert parsed(found.parser, [text.removeprefix("so: ")]) == [("call", "0:get", '{"points": []}')]
    for short in ("<tool_", "<"):
        assert parsed(found.parser, list(short)) == [("content", "", short)]


def test_forced_calls_win_over_structured_output() -> None:
    """As OpenAI has it: the schema is the answer's, and there is none. It has to compile all the same."""
    alone, beside = (
        resolved(chat(**fields), model()).sampling.grammar for fields in ({}, {"json_schema": '{"type": "null"}'})
    )
    assert alone == beside
    with pytest.raises(InvalidArgument) as caught:
        resolved(chat(regex="("), model())
    assert [v.field for v in caught.value.violations] == ["structured_output.regex"]


def test_types_of_parameters_come_from_the_schemas() -> None:
    """For formats that write values without them, also where another gateway reads on."""
    request = chat(mode=pb.TOOL_MODE_AUTO)
    found = resolved(request, model(), "qwen3-coder").parsing
    assert found is not None
    assert found.tool_types["get_weather"] == {"city": ["string"], "days": ["integer"]}
    assert ChatParsing.from_json(found.to_json()) == found
    output = "<tool_call><function=get_weather><parameter=city>5</parameter><parameter=days>5</parameter></function></tool_call>"
    assert parsed(found.parser, list(output)) == [("call", "0:get_weather", '{"city": "5", "days": 5}')]
    hermes = resolved(request, model(), "hermes").parsing
    assert hermes is not None
    assert not hermes.tool_types


def test_only_the_named_tool_is_called_and_once() -> None:
    """The others are told to the template, as they may matter to the model."""
    text = model()
    found = resolved(chat(name="get"), text)
    assert found.parsing is not None
    assert (found.parsing.tool_names, found.parsing.max_calls) == (("get",), 1)
    assert "get_weather.v2" in text.decode(found.prompt_token_ids)
    heard, _, _ = hear(random_output(text, found.sampling.grammar, random.Random(1)), how=found.parsing, model=text)
    assert [name for _, name, _ in heard.parts] == ["0:get"]


@pytest.mark.parametrize(
    ("request_", "tool_format", "has_grammar", "is_told"),
    [
        (chat(mode=pb.TOOL_MODE_AUTO), "hermes", False, True),
        (chat(mode=pb.TOOL_MODE_NONE), "none", False, False),
        (chat(mode=pb.TOOL_MODE_UNSPECIFIED), "hermes", False, True),
        (chat(), "hermes", True, True),
        (chat(mode=pb.TOOL_MODE_AUTO, json_schema="{}"), "hermes", True, True),
        (chat(mode=pb.TOOL_MODE_NONE, json_schema="{}"), "none", True, False),
        (chat(mode=pb.TOOL_MODE_AUTO, tools=(), json_schema="{}"), "none", True, False),
        (chat(mode=pb.TOOL_MODE_AUTO, tools=()), "none", False, False),
    ],
)
def test_what_tool_choice_means(request_: pb.ChatRequest, tool_format: str, has_grammar: bool, is_told: bool) -> None:
    """AUTO parses, NONE does not even tell of the tools, REQUIRED forces; structured output without tools is content."""
    found = resolved(request_, model())
    assert found.parsing is not None
    assert found.parsing.tool_format == tool_format
    assert bool(found.sampling.grammar.kind) == has_grammar
    assert ("get_weather" in models.tiny().decode(found.prompt_token_ids)) == is_told


def test_a_model_whose_template_knows_no_calls_is_forced_as_hermes() -> None:
    """So that it works with any model; free text of such a model is not parsed."""
    plain = model("{% for m in messages %}{{ m.content }}{% endfor %}")
    forced = resolved(chat(), plain).parsing
    assert forced is not None
    assert forced.tool_format == "hermes"
    free = resolved(chat(mode=pb.TOOL_MODE_AUTO), plain).parsing
    assert free is not None
    assert free.parser() is None


def test_thought_that_the_prompt_opened_is_closed_before_the_call() -> None:
    """The grammar begins inside of it; structured output has none."""
    text = model("{{ messages[0].content }}<tool_call><think>\n")
    found = resolved(chat(), text)
    assert found.parsing is not None
    assert found.parsing.reasoning_open
    begin = "Hm.\n</think>\n\n"
    compiler = compiler_of(text)
    matcher = compiler.compile(found.sampling.grammar)
    ids = compiler.encode(begin)
    assert matcher.validate_tokens(ids) == len(ids)
    structured = resolved(chat(mode=pb.TOOL_MODE_NONE, json_schema="{}"), text).parsing
    assert structured is not None
    assert structured.parser() is None


def test_a_tool_without_parameters_is_called_without_arguments() -> None:
    """As inference.proto says of an empty parameters_json: {} and nothing else."""
    text, request = model(), chat()
    for tool in request.tools:
        tool.ClearField("parameters_json")
    compiler = compiler_of(text)
    grammar = resolved(request, text).sampling.grammar
    name = request.tools[0].name
    begin = f'<tool_call>\n{{"name": "{name}", "arguments": {{'
    for behind, is_whole in (("}}\n</tool_call>", True), ('"city": 1}}\n</tool_call>', False)):
        ids = compiler.encode(begin + behind)
        assert (compiler.compile(grammar).validate_tokens(ids) == len(ids)) == is_whole


def test_a_schema_that_cannot_be_forced_is_named() -> None:
    """Forced, it has to compile; told only, it may be any object's."""
    request = chat()
    request.tools[
        1
    ].parameters_json = (
        '{"type": "object", "properties": {"a": {"type": "string", "format": "no such thing"}}, "not": {}}'
    )
    with pytest.raises(InvalidArgument) as caught:
        resolved(request, model())
    assert [v.field for v in caught.value.violations] == ["tools[1].parameters_json"]
    request.tool_choice.mode = pb.TOOL_MODE_AUTO
    resolved(request, model())
    request.json_schema = "{}"
    beside = resolved(request, model())
    assert "no such thing" not in beside.sampling.grammar.text, "it may still be called, with any object"


def test_128_large_tools_compile() -> None:
    """The most that there may be: as many tools as allowed, with more text than a Lark grammar of a client may have."""
    request = chat(tools=())
    for i in range(128):
        properties = {f"property_{i}_{k}": {"type": "string", "description": "x" * 90} for k in range(5)}
        request.tools.add(name=f"tool_{i}", parameters_json=json.dumps({"type": "object", "properties": properties}))
    text = TextModel(
        with_special()._tokenizer,
        limits=common_pb2.ModelLimits(model="m", max_model_len=2**20, vocab_size=4096, eos_token_ids=[0]),
        chat_template="<tool_call>",
    )
    found = resolved(request, text)
    assert len(found.sampling.grammar.text) > 80_000
