"""Types of tools' parameters by their JSON schemas, and the JSON of values that a model writes without their type.

As in the reference parsers of the vendors (Qwen3-Coder, GLM, MiniMax): values are converted by the tool's schema.
"""

import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, TypeAlias

from pydantic_core import from_json

from gateway_svc.chat.tool_calls.literals import PYTHON, literal_json

STRING = "string"

ToolTypes: TypeAlias = Mapping[str, Mapping[str, Sequence[str]]]
"""JSON types of each tool's parameters; a parameter that is missing may have any type."""

_TYPE_OF = {
    str: STRING,
    bool: "boolean",
    int: "integer",
    float: "number",
    dict: "object",
    list: "array",
    type(None): "null",
}
_WORDS = {"True": "true", "False": "false", "None": "null"}
_MAX_DEPTH = 16


def parameter_types(schema: Mapping[str, Any]) -> dict[str, list[str]]:
    """Types of an object's properties; one that the schema gives no type is left out."""
    properties = schema.get("properties")
    if not isinstance(properties, dict):
        return {}
    types = {key: sorted(_types(value, schema, _MAX_DEPTH)) for key, value in properties.items()}
    return {key: found for key, found in types.items() if found}


def json_value(text: str, types: Collection[str]) -> str:
    """JSON of a value written as `text`; `types`: its JSON types, empty = any.

    A string unless the text is JSON, or Python, of one of the types.
    """
    if list(types) != [STRING]:
        value = _json(text.strip())
        if value is not None and (STRING not in types or _fits(value, types)):
            return value
    return json.dumps(text, ensure_ascii=False)


def _fits(value: str, types: Collection[str]) -> bool:
    kind = _TYPE_OF[type(from_json(value))]
    return kind != STRING and (kind in types or (kind == "integer" and "number" in types))


def _json(text: str) -> str | None:
    """The text if it is JSON, else JSON of the Python that some models write instead; None if it is neither."""
    text = _WORDS.get(text, text)
    try:
        from_json(text, allow_inf_nan=False)
    except ValueError:
        return literal_json(text, PYTHON) if text.startswith(("{", "[")) else None
    return text


def _types(schema: Any, root: Mapping[str, Any], depth: int) -> set[str]:
    """JSON types that a schema allows; empty = any."""
    if not isinstance(schema, dict) or depth == 0:
        return set()
    if isinstance(schema.get("$ref"), str):
        return _types(_referred(schema["$ref"], root), root, depth - 1)
    given = schema.get("type")
    if isinstance(given, str | list):
        return {given} if isinstance(given, str) else {kind for kind in given if isinstance(kind, str)}
    if "enum" in schema or "const" in schema:
        values = schema["enum"] if isinstance(schema.get("enum"), list) else [schema.get("const")]
        return {_TYPE_OF[type(value)] for value in values}
    for key in ("anyOf", "oneOf", "allOf"):
        if isinstance(schema.get(key), list):
            return _union(_types(part, root, depth - 1) for part in schema[key])
    return set()


def _union(parts: Iterable[set[str]]) -> set[str]:
    """Union of types; any, if one of the parts may be any."""
    found = list(parts)
    return set().union(*found) if all(found) else set()


def _referred(reference: str, root: Mapping[str, Any]) -> Any:
    """Target of a reference within the schema; None if there is none."""
    target: Any = root
    for name in reference.removeprefix("#").strip("/").split("/"):
        target = target.get(name.replace("~1", "/").replace("~0", "~")) if isinstance(target, dict) else None
    return target
