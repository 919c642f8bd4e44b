"""Calls of every family are read whatever the cuts of the stream, and what is no call reaches the client as text."""

import json
import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from gateway_svc.chat.tool_calls.call_parser_base import CallRules
from gateway_svc.chat.tool_calls.parameter_types import parameter_types
from gateway_svc.chat.tool_calls.tool_formats import TOOL_FORMATS
from gateway_svc.text.output_parser import OutputParser
from tests.support.services.call_writers import TOOLS, WRITERS, Call, random_calls
from tests.support.services.chat_outputs import Parts, cut, parsed

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
