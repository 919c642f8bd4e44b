"""Convert structured output fields of OpenAI's and other clients to our oneof. Pure.

OpenAI: `response_format`. vLLM: `structured_outputs` {json, regex, choice, grammar, json_object} and the
older `guided_json`, `guided_regex`, `guided_choice`, `guided_grammar`. SGLang and llama.cpp: `regex`,
`json_schema`. TGI: `grammar` {type, value}. At most one of all.
"""

from collections.abc import Mapping
from typing import Any

from gateway_svc.http.json_body import json_text, refuse
from protos.inference.v1 import inference_pb2 as pb

FIELDS = (
    "response_format",
    "structured_outputs",
    "guided_json",
    "guided_regex",
    "guided_choice",
    "guided_grammar",
    "regex",
    "json_schema",
    "grammar",
)
_KINDS = {"json_schema": "json"}
_ANY_OBJECT = '{"type":"object"}'


def set_structured_output(request: pb.GenerateRequest | pb.ChatRequest, fields: Mapping[str, Any]) -> None:
    """Set the oneof from the `FIELDS` given. Raises InvalidArgument for several, and for malformed values."""
    wishes = {name: fields[name] for name in FIELDS if fields.get(name) is not None}
    wishes = {name: value for name, value in wishes.items() if value != {"type": "text"}}
    if len(wishes) > 1:
        refuse(
            sorted(wishes)[0], f"is one of several wishes for structured output: {', '.join(sorted(wishes))}; send one"
        )
    for name, value in wishes.items():
        if name == "response_format":
            request.json_schema = _response_format(value)
        elif name == "structured_outputs":
            _set_vllm(request, name, value)
        elif name == "grammar":
            _set_tgi(request, name, value)
        else:
            _set(request, name, _KINDS.get(name) or name.removeprefix("guided_"), value)


def _response_format(value: Any) -> str:
    match value:
        case {"type": "json_object"}:
            return _ANY_OBJECT
        case {"type": "json_schema", "json_schema": {"schema": dict() as schema}}:
            return json_text(schema, "response_format")
    refuse(
        "response_format",
        'must be {"type": "text" | "json_object"} or {"type": "json_schema", "json_schema": {"schema": ...}}',
    )


def _set_vllm(request: pb.GenerateRequest | pb.ChatRequest, field: str, value: Any) -> None:
    given = {kind: wish for kind, wish in value.items() if wish is not None} if isinstance(value, dict) else {}
    if len(given) != 1:
        refuse(field, "must be an object with exactly one of json, regex, choice, grammar, json_object")
    ((kind, wish),) = given.items()
    if kind == "json_object":
        request.json_schema = _ANY_OBJECT
    else:
        _set(request, f"{field}.{kind}", kind, wish)


def _set_tgi(request: pb.GenerateRequest | pb.ChatRequest, field: str, value: Any) -> None:
    match value:
        case {"type": "json", "value": wish} | {"type": "json_schema", "value": {"schema": wish}}:
            _set(request, f"{field}.value", "json", wish)
        case {"type": "regex", "value": wish}:
            _set(request, f"{field}.value", "regex", wish)
        case _:
            refuse(
                field,
                'must be {"type": "json" | "regex", "value": ...}; GBNF is not read: send guided_grammar with a Lark grammar',
            )


def _set(request: pb.GenerateRequest | pb.ChatRequest, field: str, kind: str, value: Any) -> None:
    """Set one constraint. `kind`: json, regex, choice or grammar."""
    if kind == "json" and isinstance(value, str | dict | bool):
        request.json_schema = value if isinstance(value, str) else json_text(value, field)
    elif kind == "choice" and isinstance(value, list) and all(isinstance(item, str) for item in value):
        request.choice.SetInParent()
        request.choice.choices.extend(value)
    elif kind == "regex" and isinstance(value, str):
        request.regex = value
    elif kind == "grammar" and isinstance(value, str):
        request.lark = value
    else:
        refuse(field, "is of no use: json takes a schema, choice a list of texts, regex and grammar a text")
