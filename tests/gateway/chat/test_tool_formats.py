"""Calls of every family are read whatever the cuts of the stream, and what is no call reaches the client as text."""

import json
import random
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from gateway_svc.chat.tool_calls.call_parser_base import CallRules
from gateway_svc.chat.tool_calls.format_choice import REASONING_FORMATS
from gateway_svc.chat.tool_calls.parameter_types import json_value, parameter_types
from gateway_svc.chat.tool_calls.tool_formats import TOOL_FORMATS
from gateway_svc.text.output_parser import OutputParser, TextSpan
from tests.support.services.call_writers import TOOLS, WRITERS, Call, random_calls
from tests.support.services.chat_outputs import Parts, cut, merged, parsed

SAMPLE, WHOLE = 3, 200
AT_START = frozenset({"llama3", "llama4"})
TYPES = {name: parameter_types(schema) for name, schema in TOOLS.items()}


def maker(name: str) -> Callable[[], OutputParser]:
    """Parsers of a format, without the guard that hides their errors."""
    rules = CallRules(frozenset(TOOLS), str, types=TYPES)
    return lambda: TOOL_FORMATS[name].parser(rules)


def values(parts: Parts) -> list[Any]:
    """Parts with the values of arguments in place of their JSON."""
    return [(kind, name, json.loads(text) if kind == "call" else text) for kind, name, text in parts]


def expected(calls: Sequence[Call], content: str) -> list[Any]:
    said = [("content", "", content)] if content else []
    return said + [("call", f"{i}:{name}", arguments) for i, (name, arguments) in enumerate(calls)]


def check_calls(name: str, rng: random.Random) -> int:
    """Random calls, cut once at each place, at random places and at every character; returns the number of splits."""
    calls = random_calls(rng)
    content = "" if name in AT_START else rng.choice(("", "I look. ", "a < b"))
    text = content + WRITERS[name](calls, rng)
    whole = parsed(maker(name), [text])
    assert values(whole) == expected(calls, content), text
    assert parsed(maker(name), list(text)) == whole
    for place in range(1, len(text)):
        assert parsed(maker(name), [text[:place], text[place:]]) == whole, (text[:place], text[place:])
    for _ in range(3):
        assert parsed(maker(name), cut(text, rng.choices(range(len(text) + 1), k=5))) == whole
    return len(text) + 3


def test_a_recipient_before_the_first_channel() -> None:
    """gpt-oss's prompt ends within a header, which the output then continues as the template writes it."""
    text = ' to=functions.add<|channel|>commentary json<|message|>{"a": 1}<|call|>'
    for place in range(len(text)):
        cuts = [piece for piece in (text[:place], text[place:]) if piece]
        assert parsed(maker("harmony"), cuts) == [("call", "0:add", '{"a": 1}')]


def test_every_format_has_a_writer() -> None:
    """So that none is left out of the tests here."""
    assert set(WRITERS) == set(TOOL_FORMATS)


@pytest.mark.parametrize("name", TOOL_FORMATS)
def test_calls_do_not_depend_on_the_split(name: str, record_property: Any) -> None:
    """Some calls of each family, at every split."""
    rng = random.Random(name)
    num_splits = sum(check_calls(name, rng) for _ in range(SAMPLE))
    record_property("size", f"{SAMPLE} of {WHOLE} outputs, {num_splits} splits")


@pytest.mark.long
@pytest.mark.parametrize("name", TOOL_FORMATS)
def test_many_calls_do_not_depend_on_the_split(name: str, record_property: Any) -> None:
    """Many of each."""
    rng = random.Random(f"{name}, many")
    num_splits = sum(check_calls(name, rng) for _ in range(WHOLE))
    record_property("size", f"{WHOLE} of {WHOLE} outputs, {num_splits} splits")


# --- failures of peers -----------------------------------------------------------------------------------------------

GLM_TWO = (
    "<tool_call>get_weather<arg_key>city</arg_key><arg_value>Paris</arg_value><arg_key>days</arg_key>"
    "<arg_value>3</arg_value></tool_call><tool_call>add</tool_call>"
)
QWEN_TWO = (
    "<tool_call>\n<function=get_weather>\n<parameter=city>\nParis\n</parameter>\n<parameter=where>\n"
    '{"a": [1, 2]}\n</parameter>\n</function>\n</tool_call><tool_call>\n<function=add>\n</function>\n</tool_call>'
)
PEERS: dict[str, tuple[str, str, list[Call]]] = {
    "vllm#39253, sglang#19345": ("glm", GLM_TWO, [("get_weather", {"city": "Paris", "days": 3}), ("add", {})]),
    "vllm#44326": ("glm", "<tool_call>add</tool_call>", [("add", {})]),
    "vllm#45256, vllm#45440": (
        "qwen3-coder",
        QWEN_TWO,
        [("get_weather", {"city": "Paris", "where": {"a": [1, 2]}}), ("add", {})],
    ),
    "sglang#35564": (
        "minimax-m2",
        '<minimax:tool_call><invoke name="add"></invoke></minimax:tool_call>',
        [("add", {})],
    ),
    "vllm#41967": (
        "gemma4",
        '<|tool_call>call:get_weather{city:<|"|>Pa{r}is<|"|>,ratio:108.2}<tool_call|><|tool_call>call:add{}<tool_call|>',
        [("get_weather", {"city": "Pa{r}is", "ratio": 108.2}), ("add", {})],
    ),
    "sglang#35153": (
        "deepseek-v3.1",
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>add<｜tool▁sep｜>{}<｜tool▁call▁end｜>"
        '<｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>{"city": "P"}<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
        [("add", {}), ("get_weather", {"city": "P"})],
    ),
    "sglang#34925": (
        "step3",
        '<｜tool_calls_begin｜><｜tool_call_begin｜>function<｜tool_sep｜><steptml:invoke name="add"></steptml:invoke>'
        '<｜tool_call_end｜><｜tool_call_begin｜>function<｜tool_sep｜><steptml:invoke name="get_weather">'
        '<steptml:parameter name="city">SF</steptml:parameter></steptml:invoke><｜tool_call_end｜><｜tool_calls_end｜>',
        [("add", {}), ("get_weather", {"city": "SF"})],
    ),
}


@pytest.mark.parametrize("case", PEERS)
def test_calls_that_peers_lose_arrive(case: str) -> None:
    """In deltas of any size, as `stream_interval` and speculative tokens make them."""
    name, text, calls = PEERS[case]
    for size in range(1, len(text) + 1):
        texts = [text[i : i + size] for i in range(0, len(text), size)]
        assert values(parsed(maker(name), texts)) == expected(calls, ""), size


@pytest.mark.parametrize(
    ("schema", "types"),
    [
        ({"type": "string"}, ["string"]),
        ({"type": ["null", "integer"]}, ["integer", "null"]),
        ({"enum": ["a", 1, None]}, ["integer", "null", "string"]),
        ({"const": False}, ["boolean"]),
        ({"anyOf": [{"type": "array"}, {"$ref": "#/$defs/a~1b"}]}, ["array", "object"]),
        ({"anyOf": [{"type": "array"}, {}]}, None),
        ({"$ref": "#/properties/x"}, None),
        ({"$ref": "#/nowhere"}, None),
        ({"type": 5}, None),
        (True, None),
    ],
)
def test_types_of_a_schema(schema: Any, types: list[str] | None) -> None:
    """None where it allows any, or is no schema; a reference may lead back to itself."""
    root = {"type": "object", "properties": {"x": schema}, "$defs": {"a/b": {"type": "object"}}}
    assert parameter_types(root).get("x") == types


@pytest.mark.parametrize(
    ("text", "types", "value"),
    [
        ("5", ["string"], "5"),
        ("5", ["integer"], 5),
        ("five", ["integer"], "five"),
        ("5", [], 5),
        ("five", [], "five"),
        ("null", ["null", "string"], None),
        ("5", ["null", "string"], "5"),
        ("5", ["number", "string"], 5),
        ("True", ["boolean"], True),
        ("['a', {'b': None}]", ["array"], ["a", {"b": None}]),
        ("{'a': \"it's\\n\"}", [], {"a": "it's\n"}),
        ("[1, f(2)]", [], "[1, f(2)]"),
        ("NaN", ["number"], "NaN"),
        ("", ["integer"], ""),
        (" 5\n", ["integer"], 5),
    ],
)
def test_values_get_the_types_of_the_schema(text: str, types: list[str], value: Any) -> None:
    """JSON or Python of a type that is allowed, else a string."""
    assert json.loads(json_value(text, types)) == value


def test_ids_that_the_model_writes_are_kept() -> None:
    """Kimi's templates need them; the second use of an id gets one of ours."""
    text = WRITERS["kimi-k2"]([("add", {}), ("get_weather", {})], random.Random(0))
    spans = maker("kimi-k2")().feed(text + text)
    ids = [span.part.call_id for span in spans if span.part.name]
    assert ids == ["functions.add:0", "functions.get_weather:1", "2", "3"]


def test_strings_are_shown_as_they_come() -> None:
    """A long text of a parameter is not held until its end."""
    parser = maker("qwen3-coder")()
    begin = "<tool_call>\n<function=ns.write-file>\n<parameter=content>\n"
    shown = merged(parser.feed(begin + "line\n" * 100), begin + "line\n" * 100)
    assert shown[0][2].startswith('{"content": "line\\nline')
    assert shown[0][2].count("line") == 100


@pytest.mark.parametrize("size", [4, 17])
def test_closing_markers_in_strings_of_a_list_do_not_end_it(size: int) -> None:
    """Neither in one that is held until its end, nor in one that is too long for that; `size` in thousands of characters."""
    value = ["x" * 1000] * size + ["\\", '"</parameter>"', {"</parameter>": "</parameter> \\"}]
    head = "<tool_call>\n<function=ns.write-file>\n<parameter=lines>\n"
    text = f"{head}{json.dumps(value)}\n</parameter>\n</function>\n</tool_call>"
    want = [("call", "0:ns.write-file", {"lines": value})]
    assert values(parsed(maker("qwen3-coder"), [text])) == want
    for step in (1, 7, 997):
        assert values(parsed(maker("qwen3-coder"), cut(text, range(0, len(text), step)))) == want


# --- choice of the format --------------------------------------------------------------------------------------------

# Stylised: the markers of each family's chat template, in the form in which templates write them.
TEMPLATES: dict[str, tuple[str | None, str | None, str]] = {
    "Qwen3": ("hermes", "think", "'<tool_call>\n{\"name\": \"' ~ '</think>' ~ '\n</tool_call>'"),
    "Qwen2.5, Granite 4": ("hermes", None, "return a json object within <tool_call></tool_call> XML tags"),
    "Qwen3-Coder": (
        "qwen3-coder",
        None,
        "'<tool_call>\n<function=' + call.name + '>\n' ~ '<parameter=' ~ '</parameter>'",
    ),
    "Qwen3.5, Nemotron 3": ("qwen3-coder", "think", "'<think>\n' ~ '<tool_call>\n<function=' ~ '</function>'"),
    "GLM-4.5, 4.6, 4.7": ("glm", "think", "<tool_call>{name}<arg_key>{key}</arg_key><arg_value> ~ '</think>'"),
    "MiniMax M2": ("minimax-m2", "think", "'<minimax:tool_call>' ~ '<invoke name=\"' ~ '<parameter name=' ~ '<think>'"),
    "Seed-OSS": ("seed-oss", "seed-oss", "'<seed:tool_call>' ~ '<function=' ~ '<parameter=' ~ '<seed:think>'"),
    "DeepSeek V3, R1": (
        "deepseek-v3",
        "think",
        "'<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>' ~ '```json' ~ '</think>'",
    ),
    "DeepSeek V3.1": ("deepseek-v3.1", "think", "'<｜tool▁calls▁begin｜>' ~ '<｜tool▁sep｜>' ~ '</think>'"),
    "DeepSeek V3.2": ("deepseek-v3.2", "think", "'<｜DSML｜function_calls>' ~ '<｜DSML｜invoke name=' ~ '<think>'"),
    "DeepSeek V4": (
        "deepseek-v4",
        "think",
        "'<' + '｜DSML｜' + 'tool_calls>' ~ '<' + '｜DSML｜' + 'invoke name=\"' ~ '<think>'",
    ),
    "Kimi K2": ("kimi-k2", None, "'<|tool_calls_section_begin|><|tool_call_begin|>' + call['id']"),
    "Kimi K2 Thinking": ("kimi-k2", "think", "'<|tool_calls_section_begin|>' ~ '<think>'"),
    "gpt-oss": (
        "harmony",
        "harmony",
        "'<|start|>assistant<|channel|>analysis<|message|>' ~ ' to=functions.' ~ '<|call|>'",
    ),
    "Step3": ("step3", "think", "'<｜tool_calls_begin｜>' ~ '<steptml:invoke name=' ~ '<think>'"),
    "Gemma 3": ("gemma3", None, "'<start_of_turn>model\n' ~ '```tool_code\n'"),
    "Gemma 4": ("gemma4", "gemma4", "'<|tool_call>call:' + name ~ '<tool_call|>' ~ '<|channel>thought\n<channel|>'"),
    "FunctionGemma": ("functiongemma", None, "'<start_function_call>call:' ~ '<escape>' ~ '<end_function_call>'"),
    "Granite 3": ("granite", "granite", "'<|start_of_role|>' ~ '<|tool_call|>' ~ 'Here is my thought process:'"),
    "Granite 3.3": ("granite", "granite-3.3", "'<|tool_call|>' ~ 'between <think></think> and <response></response>'"),
    "Phi-4-mini": ("phi4", None, "'<|tool|>' + tools + '<|/tool|>' ~ '<|tool_call|>' ~ '<|/tool_call|>'"),
    "Command R7B, A": ("command", "command", "'<|START_THINKING|>' ~ '<|START_ACTION|>' ~ '<|START_RESPONSE|>'"),
    "Hunyuan A13B": ("hunyuan", "hunyuan", "'<tool_calls>[' ~ '<think>\n' ~ '<answer>\n'"),
    "Nemotron Nano 2": ("nemotron", "think", "'<TOOLCALL>[' ~ '</think>'"),
    "Mistral 7B 0.3": ("mistral", None, "'[TOOL_CALLS] [' ~ '[TOOL_RESULTS]'"),
    "Mistral Small 3.2": ("mistral-args", None, "'[TOOL_CALLS]' + name + '[CALL_ID]' + id + '[ARGS]'"),
    "Magistral": ("mistral-args", "mistral", "'[THINK]' ~ '[/THINK]' ~ '[TOOL_CALLS]' + name + '[ARGS]'"),
    "Llama 3": ("llama3", None, "'<|start_header_id|>' ~ '{\"name\": name, \"parameters\": {}}' ~ '<|python_tag|>'"),
    "Llama 4": ("llama4", None, "'<|header_start|>assistant<|header_end|>' ~ '\"parameters\": ' ~ '<|python_start|>'"),
    "Olmo 3": ("olmo3", "think", "'<function_calls>' ~ '</function_calls>' ~ '<think>'"),
    "LFM2": ("lfm2", None, "'<|tool_list_start|>[' ~ '<|tool_call_start|>[' ~ '<|tool_call_end|>'"),
    "LFM2 8B": ("lfm2", None, "'List of tools: <|tool_list_start|>['"),
    "Apriel 1.5": ("hunyuan", None, "'<tool_calls>[' ~ ']</tool_calls>' ~ '<tool_call>'"),
    "MiniMax M3": (None, None, "ns ~ '<tool_call>' ~ ns ~ '<invoke name=\"' ~ '<mm:think>'"),
    "Functionary 3.1": (None, None, "'<|start_header_id|>' ~ '<function=example>{\"parameters\"}' ~ '<|python_tag|>'"),
    "Gemma 2": (None, None, "'<start_of_turn>model\n'"),
}


@pytest.mark.parametrize("family", TEMPLATES)
def test_a_template_selects_one_format(family: str) -> None:
    """The family's, and no other fits."""
    tools, reasoning, source = TEMPLATES[family]
    assert [name for name, found in TOOL_FORMATS.items() if found.fits(source)] == ([tools] if tools else [])
    assert [name for name, found in REASONING_FORMATS.items() if found.fits(source)] == (
        [reasoning] if reasoning else []
    )


def test_each_format_has_a_template() -> None:
    """So that none can be chosen by name alone."""
    assert {tools for tools, _, _ in TEMPLATES.values()} == {*TOOL_FORMATS, None}
    assert {reasoning for _, reasoning, _ in TEMPLATES.values()} == {*REASONING_FORMATS, None}


def test_the_page_names_each_format() -> None:
    """In the order of the settings."""
    page = (Path(__file__).parents[3] / "docs" / "tool-formats.md").read_text()
    assert re.findall(r"^\| `(\w[\w.-]*)` \|", page, re.MULTILINE) == [*TOOL_FORMATS, *REASONING_FORMATS]


# --- reasoning before calls ------------------------------------------------------------------------------------------

REASONED = {
    "think": ("qwen3-coder", "<think>\n", "\n</think>\n\n"),
    "hunyuan": ("hunyuan", "<think>\n", "\n</think>\n<answer>\n"),
    "seed-oss": ("seed-oss", "<seed:think>", "</seed:think>\n"),
    "mistral": ("mistral-args", "[THINK]", "[/THINK]"),
    "command": ("command", "<|START_THINKING|>", "<|END_THINKING|>"),
    "granite-3.3": ("granite", "<think>", "</think>\n\n"),
    "granite": ("granite", "Here's my thought process:\n", "\nHere is my response:\n"),
    "gemma4": ("gemma4", "<|channel>thought\n", "<channel|>"),
    "harmony": ("harmony", "<|channel|>analysis<|message|>", "<|end|>"),
}


def test_every_reasoning_format_is_tested() -> None:
    """So that none is left out."""
    assert set(REASONED) == set(REASONING_FORMATS)


@pytest.mark.parametrize("name", REASONED)
def test_reasoning_stands_apart_from_calls(name: str) -> None:
    """At every split, also where a marker of one and of the other come in one text (vllm#43221)."""
    tool_format, begin, end = REASONED[name]
    rng = random.Random(name)
    calls = random_calls(rng)
    text = begin + "Write <tool> or [THINK" + end + WRITERS[tool_format](calls, rng)

    def make() -> OutputParser:
        return REASONING_FORMATS[name].parser(maker(tool_format)(), is_open=False)

    whole = parsed(make, [text])
    assert values(whole) == [("reasoning", "", "Write <tool> or [THINK"), *expected(calls, "")]
    assert parsed(make, list(text)) == whole
    for place in range(1, len(text)):
        assert parsed(make, [text[:place], text[place:]]) == whole


@pytest.mark.parametrize(
    ("name", "text", "parts"),
    [
        ("command", "<|START_RESPONSE|>Hi<|END_RESPONSE|>", [("content", "", "Hi")]),
        (
            "hunyuan",
            "<think>\nHm\n</think>\n<answer>\nHi\n</answer>",
            [("reasoning", "", "Hm"), ("content", "", "\nHi\n")],
        ),
        (
            "granite-3.3",
            "<think>Hm</think>\n\n<response>Hi</response>",
            [("reasoning", "", "Hm"), ("content", "", "Hi")],
        ),
        ("command", "<|START_TEXT|>Hi<|END_TEXT|>", [("content", "", "Hi")]),
        ("harmony", " to=nobody says Hi", [("content", "", " to=nobody says Hi")]),
        (
            "harmony",
            "<|channel|>analysis<|message|>Hm<|end|><|start|>assistant<|channel|>commentary<|message|>First, <|end|>"
            "<|start|>assistant<|channel|>final<|message|>Hi<|return|>",
            [("reasoning", "", "Hm"), ("content", "", "First, Hi")],
        ),
    ],
)
def test_answers_have_no_markup(name: str, text: str, parts: Parts) -> None:
    """Without tools too, at every split."""

    def make() -> OutputParser:
        return REASONING_FORMATS[name].parser(None, is_open=False)

    for place in range(len(text)):
        assert parsed(make, [piece for piece in (text[:place], text[place:]) if piece]) == parts


# --- what is malformed or cut off ------------------------------------------------------------------------------------


def damaged(text: str, rng: random.Random) -> str:
    """An output cut off, or with pieces lost, doubled, moved or foreign."""
    for _ in range(rng.randint(0, 3)):
        a, b = sorted(rng.choices(range(len(text) + 1), k=2))
        b = min(b, a + 30)
        change = rng.randrange(4)
        insert = rng.choice(("", text[a:b] * 2, "<", "{", '"', "\\", "oops", "\n\n", "(", "</parameter>"))
        text = text[:a] + (insert if change else "") + text[b if change < 2 else a :]
    return text[: rng.randrange(len(text) + 1)] if text and rng.random() < 0.5 else text


def check_damaged(name: str, rng: random.Random) -> None:
    """No exception, one answer for all splits, and no character lost."""
    text = damaged("Well: " * rng.randrange(2) + WRITERS[name](random_calls(rng, 2), rng), rng)
    parser = maker(name)()
    spans = parser.feed(text) + parser.end() if text else []
    check_conserved(spans, text, parser.markers)
    whole = merged(spans, text)
    assert parsed(maker(name), list(text)) == whole, text
    for _ in range(4):
        assert parsed(maker(name), cut(text, rng.choices(range(len(text) + 1), k=4))) == whole, text


# Names, and values of fields that are no arguments: ids, headers of messages, the type of a parameter.
_FIELDS = re.compile(
    r'"(?:type|id|tool_call_id)"\s*:\s*"[^"]*"|string="\s*\w*\s*"|(?:<\|start\|>|<\|channel\|>).*?<\|message\|>',
    re.DOTALL,
)
_ESCAPE = re.compile(r"\\+u([0-9a-f]{4})")
_NAMES = (*TOOLS, "tool_name", "name", "arguments", "parameters")


def check_conserved(spans: Sequence[TextSpan], text: str, markers: frozenset[str]) -> None:
    """Each character is in one span, and shown, or its letters are in what is shown in its place, or it is known markup."""
    place = 0
    for span in spans:
        own = text[place : place + span.num_chars]
        place += span.num_chars
        if span.text is not None:
            lost = _lost(own if place < len(text) else _without_cut_marker(own, markers), span.text, markers)
            assert not lost, (own, span.text, lost)
    assert place == len(text)


def _lost(own: str, shown: str, markers: frozenset[str]) -> str:
    """Letters of characters that are neither markup nor shown in their place."""
    own = _FIELDS.sub("", own)
    for word in (*sorted(markers, key=len, reverse=True), *(() if shown else _NAMES)):
        own = own.replace(word, " ")
    letters = iter(_letters(shown))
    return "".join(char for char in _letters(own) if char not in letters)


def _letters(text: str) -> str:
    """Letters without regard to how Python and JSON write words and escape characters."""
    plain = _ESCAPE.sub(lambda found: chr(int(found[1], 16)), text).lower().replace("none", "null")
    return "".join(filter(str.isalpha, plain))


def _without_cut_marker(own: str, markers: frozenset[str]) -> str:
    ends = [n for marker in markers for n in range(1, len(marker)) if own.endswith(marker[:n])]
    return own[: len(own) - max(ends)] if ends else own


@pytest.mark.parametrize("name", TOOL_FORMATS)
def test_damaged_output_reaches_the_client(name: str, record_property: Any) -> None:
    """Some outputs of each family."""
    record_property("size", "40 of 2000 outputs")
    rng = random.Random(name)
    for _ in range(40):
        check_damaged(name, rng)


@pytest.mark.long
@pytest.mark.parametrize("name", TOOL_FORMATS)
def test_much_damaged_output_reaches_the_client(name: str, record_property: Any) -> None:
    """Many of each."""
    record_property("size", "2000 of 2000 outputs")
    rng = random.Random(f"{name}, many")
    for _ in range(2000):
        check_damaged(name, rng)
