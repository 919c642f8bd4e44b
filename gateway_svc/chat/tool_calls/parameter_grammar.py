"""Grammar rules of forced parameters that stand in tags, from a tool's JSON schema."""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gateway_svc.chat.tool_calls.parameter_types import STRING, parameter_types
from gateway_svc.chat.tool_calls.pieces import KEY, WORD
from svc_common.grammars import with_bounded_whitespace

VALUE = "{value}"

WritePieces = Callable[[Sequence[str], Mapping[str, str]], str]
"""Writes texts and markers in order, some of them as the rules given for them."""

_OBJECT_KEYS = frozenset(
    {
        "type",
        "properties",
        "required",
        "additionalProperties",
        "$defs",
        "definitions",
        "$schema",
        "title",
        "description",
    }
)
_STRING_KEYS = frozenset({"type", "title", "description", "default", "examples"})
_KEY = re.compile(r"[\w.-]+( [\w.-]+)*")


@dataclass(frozen=True, slots=True)
class ParameterSyntax:
    """Syntax of a parameter: `before` its value, with placeholders for its key and (word) for whether it is a string.

    `pad`: before the marker `close`, if the value is no free text; `after`: behind that.
    """

    before: Sequence[str]
    close: str
    after: Sequence[str] = ("\n",)
    pad: str = ""


def parameter_rules(
    number: int, schema: Mapping[str, Any], syntax: ParameterSyntax, write: WritePieces
) -> list[str] | None:
    """Rules of `arguments_{number}`: the properties in the schema's order, those not required optional.

    None if tags cannot express the schema: constraints on the whole object or on the text of a string, values of
    which the type is not certain, or required properties that are not described.
    """
    types, values = parameter_types(schema), schema.get("properties") or {}
    required = schema.get("required") or []
    if not _OBJECT_KEYS.issuperset(schema) or not set(required).issubset(values):
        return None
    names, rules = [], list[str]()
    for k, (key, value) in enumerate(values.items()):
        rule = f"value_{number}_{k}"
        written = _value_rules(rule, value, types.get(key, ()), schema, syntax, write)
        if written is None or not _KEY.fullmatch(key):
            return None
        is_string = json.dumps(list(types[key]) == [STRING])
        before = [{KEY: key, WORD: is_string}.get(text, text) for text in syntax.before]
        rules += [f"parameter_{number}_{k}: {write((*before, VALUE, *syntax.after), {VALUE: rule})}", *written]
        names.append(f"parameter_{number}_{k}{'' if key in required else '?'}")
    return [f"arguments_{number}: {' '.join(names) or _EMPTY}", *rules]


_EMPTY = '""'


def _value_rules(
    rule: str, value: Any, types: Sequence[str], root: Mapping[str, Any], syntax: ParameterSyntax, write: WritePieces
) -> list[str] | None:
    """Rules of a value and its closing marker; None if they cannot express its schema."""
    end = write((syntax.pad, syntax.close) if syntax.pad else (syntax.close,), {})
    if list(types) == [STRING]:
        choices = value.get("enum", [value["const"]] if "const" in value else None)
        if not (_STRING_KEYS | {"enum", "const"}).issuperset(value):
            return None
        if choices is not None:
            return _choice_rules(rule, choices, syntax.close, end)
        close = write((syntax.close,), {})
        return [f"{rule}{'' if close.startswith('<') else '[lazy]'}: /(.|\\n)*/ {close}"]
    if not types or STRING in types:
        return None
    shared = {key: root[key] for key in ("$defs", "definitions") if key in root}
    schema = json.dumps(with_bounded_whitespace({**shared, **value}), ensure_ascii=False)
    return [f"{rule}: {rule}_json {end}", f"{rule}_json: %json {schema}"]


def _choice_rules(rule: str, choices: Sequence[Any], close: str, end: str) -> list[str] | None:
    """Rules of a string that is one of `choices`."""
    texts = [choice for choice in choices if isinstance(choice, str) and choice and close not in choice]
    if len(texts) < len(choices) or not texts:
        return None
    return [f"{rule}: ({' | '.join(json.dumps(text) for text in texts)}) {end}"]
