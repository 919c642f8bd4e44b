"""Constraints that outputs must match, with vLLM's names. Grammars are compiled, and so checked, where the model is."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from protos.inference.v1 import inference_pb2 as pb
from quire.client.value_checks import is_listing
from svc_common.errors import InvalidArgument

_ANY_OBJECT = '{"type": "object"}'


@dataclass(frozen=True, slots=True, kw_only=True)
class StructuredOutputsParams:
    """Output constraint; raises InvalidArgument unless exactly one field is set.

    json: a schema, as text or dict. regex: matches the whole output. choice: a list of texts.
    grammar: Lark, as llguidance reads it. json_object: True = any JSON object.
    """

    json: str | Mapping[str, Any] | bool | None = None
    regex: str | None = None
    choice: Sequence[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None

    def __post_init__(self) -> None:
        given = [field.name for field in fields(self) if getattr(self, field.name) is not None]
        if len(given) != 1 or self.json_object is False:
            raise InvalidArgument.field("structured_outputs", f"has {given or 'nothing'}; give exactly one kind")
        for text in self._problems():
            raise InvalidArgument.field(f"structured_outputs.{given[0]}", text)

    def _problems(self) -> Iterator[str]:
        if not isinstance(self.json, str | Mapping | bool | None):
            yield "must be a schema: a JSON text or a dict"
        if not isinstance(self.regex, str | None) or not isinstance(self.grammar, str | None):
            yield "must be a text"
        if self.choice is not None and not (is_listing(self.choice) and all(isinstance(c, str) for c in self.choice)):
            yield "must be a list of texts"

    def fill(self, request: pb.GenerateRequest | pb.ChatRequest) -> None:
        """Write the constraint into `request`."""
        if self.json is not None:
            request.json_schema = self.json if isinstance(self.json, str) else _json_text(self.json)
        elif self.json_object is not None:
            request.json_schema = _ANY_OBJECT
        elif self.regex is not None:
            request.regex = self.regex
        elif self.grammar is not None:
            request.lark = self.grammar
        else:
            request.choice.SetInParent()
            request.choice.choices.extend(self.choice or ())


def _json_text(schema: Mapping[str, Any] | bool) -> str:
    try:
        return json.dumps(schema if isinstance(schema, bool) else dict(schema))
    except (TypeError, ValueError) as error:
        raise InvalidArgument.field("structured_outputs.json", f"is no JSON: {error}") from None
