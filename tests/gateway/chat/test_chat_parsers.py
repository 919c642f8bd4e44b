"""What models write becomes content, reasoning and calls, however it is cut; malformed calls stay text."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway_svc.chat.buffered import MAX_BLANKS
from gateway_svc.chat.parsing import ChatParsing, GuardedParser
from gateway_svc.chat.tool_calls.call_parser_base import MAX_HELD_CHARS
from gateway_svc.chat.tool_calls.pieces import MAX_KEY_CHARS
from gateway_svc.chat.tool_calls.tool_formats import TOOL_FORMATS
from gateway_svc.text.output_parser import CONTENT, REASONING, PartKind, TextSpan
from svc_common.errors import InvalidArgument
from tests.support.services.chat_outputs import Parts, cut, parsed, parsing

ARGUMENTS = '{"city": "Pa\\"}ris</tool_call>", "n": [1, {"x": null}], "é": "😀"}'
CALL = ("call", "0:get_weather", ARGUMENTS)
NEXT = ("call", "1:add", "{}")
HERMES = f'<tool_call>\n{{"name": "get_weather", "arguments": {ARGUMENTS}}}\n</tool_call>'
HERMES_2 = '<tool_call>{"arguments":{},"name":"add"}</tool_call>'
BARE = f'{{"name": "get_weather", "parameters": {ARGUMENTS}}}'
BARE_2 = '{"type": "function", "name": "add", "parameters": {}}'
MARKED = f'{{"name": "get_weather", "arguments": {ARGUMENTS}, "id": "abcdefghi"}}'
MARKED_2 = '{"name": "add", "arguments": {}}'

GOOD: dict[str, tuple[str, str, Parts]] = {
    "hermes": ("hermes", HERMES, [CALL]),
    "hermes, content around": (
        "hermes",
        f"Sure.\n\n{HERMES}\n{HERMES_2}\nDone <b>",
        [("content", "", "Sure."), CALL, NEXT, ("content", "", "Done <b>")],
    ),
    "hermes without its end": ("hermes", HERMES.removesuffix("\n</tool_call>"), [CALL]),
    "hermes, its end cut off": ("hermes", HERMES.removesuffix("call>"), [CALL]),
    "hermes, cut off in the arguments": (
        "hermes",
        '<tool_call>{"name": "add", "arguments": {"a": 1',
        [("call", "0:add", '{"a": 1')],
    ),
    "hermes, arguments that end in no JSON": (
        "hermes",
        '<tool_call>{"name": "add", "arguments": {"a": <1>}}</tool_call>',
        [("call", "0:add", '{"a": '), ("content", "", "<1>}}</tool_call>")],
    ),
    "llama": ("llama3", BARE, [CALL]),
    "llama, two": ("llama3", f"\n{BARE}; {BARE_2}", [CALL, NEXT]),
    "llama, tag": ("llama3", f"<|python_tag|>{BARE};{BARE_2}", [CALL, NEXT]),
    "llama, tag behind content": ("llama3", f"Well: <|python_tag|>{BARE}", [("content", "", "Well: "), CALL]),
    "llama, text behind": ("llama3", f"{BARE} and so", [CALL, ("content", "", "and so")]),
    "mistral": ("mistral", f"[TOOL_CALLS] [{MARKED}, {MARKED_2}]", [CALL, NEXT]),
    "mistral, content around": (
        "mistral",
        f"Let me[TOOL_CALLS][{MARKED}] ok",
        [("content", "", "Let me"), CALL, ("content", "", "ok")],
    ),
    "mistral, newer": (
        "mistral-args",
        f"[TOOL_CALLS]get_weather[ARGS]{ARGUMENTS}[TOOL_CALLS]add[ARGS]{{}}",
        [CALL, NEXT],
    ),
    "mistral, with ids": ("mistral-args", f"[TOOL_CALLS]get_weather[CALL_ID]123456789[ARGS]{ARGUMENTS}", [CALL]),
    "mistral, without a marker": ("mistral-args", f"[TOOL_CALLS]get_weather{ARGUMENTS}", [CALL]),
}
NO_CALLS = {
    "hermes": (
        "plain text",
        "a < b <tool_cal l>",
        "<tool_call>",
        "<tool_call>oops</tool_call>",
        '<tool_call>{"name": "unknown", "arguments": {}}</tool_call>',
        '<tool_call>{"name": "add"}</tool_call>',
        '<tool_call>{"name": "add", "arguments": "{}"}</tool_call>',
        '<tool_call>{"name": 1, "arguments": {}}',
        '<tool_call>{"name": "add", "arguments": {\'a\'}}',
        '<tool_call>{"other": "add"}',
        '<tool_call>{"name": "add", "name": "add", "arguments": {}}',
        "x\n\n",
        "\n",
        '<tool_call>{"name": "' + "a" * 300 + '", "arguments": {}}',
        '<tool_call>{"arguments": {}, "name": "ad',
    ),
    "llama3": (
        "plain text",
        '{"answer": 1}',
        '{"name": "add"}',
        "{",
        '{"name": "add", "parameters": 3}',
        "  ",
        "<|python_tag|>print(1)",
        "<|python_tag|>",
        '{"a": 1} {"name": "add", "parameters": {}}',
        'text {"name": "add", "parameters": {}}',
        "<|python",
        "\n{1}",
    ),
    "mistral": (
        "plain text",
        "[TOOL_CALLS]",
        "[TOOL_CALLS] ",
        "[TOOL_CALLS][",
        "[TOOL_CALLS][]",
        '[TOOL_CALLS][{"name": "unknown", "arguments": {}}]',
        "[TOOL_CALLS]unknown[ARGS]{}",
        "[TOOL_CALLS]add[ARGS]",
        "[TOOL_CALLS]add[ARGS]x",
        "[TOOL_CALLS]add",
        "[TOOL_CALLS]add [CALL",
        "[TOOL_CA",
        "a[TOOL_CALLS]b c",
        "[TOOL_CALLS]" + "a" * 70,
    ),
}


@pytest.mark.parametrize("case", GOOD)
def test_calls_are_found_at_every_cut(case: str) -> None:
    """Whole, character by character, and cut once at each place: the same parts; arguments come as the model wrote them."""
    name, text, expected = GOOD[case]
    make = parsing(name).parser
    assert parsed(make, [text]) == expected
    assert parsed(make, list(text)) == expected
    for place in range(1, len(text)):
        assert parsed(make, [text[:place], text[place:]]) == expected


@pytest.mark.parametrize(("name", "text"), [(name, text) for name, texts in NO_CALLS.items() for text in texts])
def test_what_is_no_call_is_content(name: str, text: str) -> None:
    """Every character of it, at every cut: nothing is lost, nothing is an error."""
    make = parsing(name).parser
    for place in range(len(text) + 1):
        assert parsed(make, [part for part in (text[:place], text[place:]) if part]) == [("content", "", text)]


@pytest.mark.parametrize(
    ("text", "is_open", "expected"),
    [
        ("<think>\nHm\n\nwell\n</think>\n\nYes", False, [("reasoning", "", "Hm\n\nwell"), ("content", "", "Yes")]),
        ("Hm</think>Yes", True, [("reasoning", "", "Hm"), ("content", "", "Yes")]),
        ("<think>Hm</think>Yes", True, [("reasoning", "", "Hm"), ("content", "", "Yes")]),
        ("Hm, no end </thin", True, [("reasoning", "", "Hm, no end </thin")]),
        ("Yes <think>no</think>", False, [("content", "", "Yes <think>no</think>")]),
        ("<thin", False, [("content", "", "<thin")]),
        ("</think>", True, []),
        ("  ", False, [("content", "", "  ")]),
        ("", True, []),
        (f"a\n</think>\n\n{HERMES}", True, [("reasoning", "", "a"), CALL]),
        (f"{HERMES}", True, [("reasoning", "", HERMES)]),
    ],
)
def test_reasoning_comes_before_the_answer(text: str, is_open: bool, expected: Parts) -> None:
    """At every cut; calls are looked for in the answer alone."""
    make = parsing("hermes", reasoning="think", is_open=is_open).parser
    assert parsed(make, list(text)) == expected
    for place in range(1, len(text)):
        assert parsed(make, [text[:place], text[place:]]) == expected


_PIECES = st.sampled_from(
    [
        "<tool_call>",
        "</tool_call>",
        "{",
        "}",
        '"',
        '"name"',
        ":",
        "add",
        '"arguments"',
        '"parameters"',
        '"add"',
        ",",
        ";",
        " ",
        "\n",
        "[",
        "]",
        "[TOOL_CALLS]",
        "[ARGS]",
        "[CALL_ID]",
        "<|python_tag|>",
        "<think>",
        "</think>",
        "\\",
        "x",
        HERMES,
        BARE,
        MARKED,
        "<tool",
        "_call>",
        "é",
        " \n" * 33,
        "\n" * 64,
    ]
)


@given(
    st.sampled_from([*TOOL_FORMATS, "none"]),
    st.booleans(),
    st.lists(_PIECES, max_size=14),
    st.lists(st.integers(0, 120), max_size=8),
)
def test_parts_do_not_depend_on_cuts(name: str, is_open: bool, pieces: list[str], points: list[int]) -> None:
    """Random output: one answer for all cuts, and nothing that is visible is lost but markup."""
    text = "".join(pieces)
    make = parsing(name, reasoning="think", is_open=is_open).parser
    whole = parsed(make, cut(text, []))
    assert parsed(make, cut(text, points)) == parsed(make, list(text)) == whole


def test_surplus_calls_are_not_told() -> None:
    """One call at most where parallel calls were refused: what more the model writes is no content either."""
    text = f"Hi {HERMES}{HERMES_2} bye"
    expected = [("content", "", "Hi "), CALL, ("content", "", "bye")]
    assert parsed(parsing("hermes", max_calls=1).parser, list(text)) == expected


def test_ids_are_a_function_of_the_salt() -> None:
    """Another gateway that reads on gives the same ids; Mistral's have the nine characters that its templates ask for."""

    def ids(made: ChatParsing, text: str, choice: int) -> list[str]:
        parser = made.parser(choice)
        assert parser is not None
        return [
            span.part.call_id for span in parser.feed(text) if span.part.kind is PartKind.CALL and span.part.call_id
        ]

    made = parsing("hermes")
    again = ChatParsing.from_json(made.to_json())
    assert again == made
    text = HERMES + HERMES_2
    assert ids(made, text, 0) == ids(again, text, 0)
    assert len({*ids(made, text, 0), *ids(made, text, 1)}) == 4
    (mistral,) = ids(parsing("mistral"), f"[TOOL_CALLS][{MARKED}]", 0)
    assert len(mistral) == 9
    assert mistral.isalnum()


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{}",
        "[]",
        '{"tool_names": 3}',
        json.dumps({"tool_names": [], "tool_format": "other"}),
        '{"tool_names": [], "x": 1}',
    ],
)
def test_a_state_of_another_release_is_refused(text: str) -> None:
    """Typed, never a crash."""
    with pytest.raises(InvalidArgument):
        ChatParsing.from_json(text)


# --- what must not happen ------------------------------------------------------------------------------------------------

ENDLESS = {
    "nested objects": ("hermes", '<tool_call>{"name": "add", "arguments": ' + '{"a":' * 5_000),
    "arguments first": ("hermes", '<tool_call>{"arguments": {"a": "' + "x" * 25_000),
    "markers": ("hermes", "<tool_call>" * 2_500),
    "calls that are none": ("hermes", '<tool_call>{"arguments":{"' * 1_000),
    "line breaks": ("hermes", "a" + "\n" * 25_000),
    "blanks behind a marker": ("hermes", "<tool_call>" + " \n" * 12_500),
    "blanks behind a call": ("hermes", HERMES + " \n" * 12_500),
    "blanks before anything": ("llama3", " " * 25_000),
    "blanks behind an object": ("llama3", BARE + " " * 25_000),
    "blanks in a list": ("mistral", f"[TOOL_CALLS][{MARKED}" + " " * 25_000),
    "blanks behind a name": ("mistral-args", "[TOOL_CALLS]add" + " " * 25_000),
    "a value": ("qwen3-coder", "<tool_call><function=add><parameter=a>" + "x" * 25_000),
    "a list as value": ("qwen3-coder", "<tool_call><function=add><parameter=a>" + "[1, " * 6_000),
    "a key": ("glm", "<tool_call>add<arg_key>" + "x" * 25_000),
    "blanks before a parameter": ("minimax-m2", '<minimax:tool_call><invoke name="add">' + " \n" * 12_500),
    "nested literals": ("olmo3", "<function_calls>add(a=" + "[" * 25_000),
    "a literal string": ("olmo3", "<function_calls>add(a='" + "x" * 25_000),
    "an argument's name": ("lfm2", "<|tool_call_start|>[add(" + "x" * 25_000),
    "a bare word": ("gemma4", "<|tool_call>call:add{a:" + "x" * 25_000),
    "a header": ("harmony", "<|channel|>" + "x" * 25_000),
    "headers": ("harmony", "<|start|>" * 3_000),
    "calls in a section": ("deepseek-v3.1", "<｜tool▁calls▁begin｜>" + "<｜tool▁call▁begin｜>" * 1_000),
    "line breaks in a thought": ("thought", "<think>a" + "\n" * 25_000),
    "blanks before a thought": ("thought", " " * 25_000),
}


# Where more is held than white space: what has no name or no type before its end, keys, words and headers.
HELD = dict.fromkeys(("arguments first", "a value", "a list as value"), MAX_HELD_CHARS + 100)
HELD |= dict.fromkeys(("a key", "an argument's name", "a bare word", "a header", "headers"), 2 * MAX_KEY_CHARS)


@pytest.mark.parametrize("case", ENDLESS)
def test_endless_output_is_told_as_it_comes(case: str) -> None:
    """However it goes on, little is held back, so that time is linear and memory bounded; but for arguments before a name."""
    name, text = ENDLESS[case]
    made = parsing(reasoning="think") if name == "thought" else parsing(name)
    parser = made.parser()
    assert parser is not None
    num_told = most_held = 0
    for i in range(0, len(text), 5):
        num_told += sum(span.num_chars for span in parser.feed(text[i : i + 5]))
        most_held = max(most_held, min(i + 5, len(text)) - num_told)
    assert most_held < HELD.get(case, 2 * MAX_BLANKS)
    whole = parsed(made.parser, [text])
    assert parsed(made.parser, cut(text, range(0, len(text), 7))) == whole


class Failing:
    """A parser with a bug: it raises, or hands out what is not there, at the third word."""

    markers: frozenset[str] = frozenset()
    current = CONTENT

    def __init__(self, *, raises: bool) -> None:
        self._raises = raises
        self._num = 0

    def feed(self, text: str) -> list[TextSpan]:
        self._num += 1
        if self._num < 3:
            return [TextSpan(1, REASONING)]
        if self._raises:
            raise ZeroDivisionError(text)
        return [TextSpan(99, CONTENT)]

    def end(self) -> list[TextSpan]:
        return []


@pytest.mark.parametrize("raises", [True, False])
def test_a_parser_that_fails_costs_no_answer(raises: bool, caplog: pytest.LogCaptureFixture) -> None:
    """The rest is content, what it held too; the log has no text of the output."""
    texts = ["ab", "cd", "secret", "gh"]
    assert parsed(lambda: GuardedParser(Failing(raises=raises)), texts) == [
        ("reasoning", "", "ab"),
        ("content", "", "cdsecretgh"),
    ]
    assert len(caplog.records) == 1
    assert "secret" not in caplog.text
    assert parsed(lambda: GuardedParser(Failing(raises=raises)), texts[:2]) == [
        ("reasoning", "", "ab"),
        ("content", "", "cd"),
    ]
