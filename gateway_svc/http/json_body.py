"""Parse clients' JSON at bounded cost: bodies into checked models, free-form parts into bounded text. Pure.

Lists stop at their first invalid element: a million invalid ones would otherwise produce a million errors.
pydantic's reader refuses what is nested deeper than 200 levels. Python's would recurse until RecursionError, at
which depth a garbage collection cannot run finalizers.
"""

import json
from collections.abc import Callable, Iterable, Mapping
from typing import Annotated, Any, NoReturn, TypeVar

import pydantic
from pydantic import BaseModel, Field
from pydantic_core import from_json

from svc_common.errors import FieldViolation, InvalidArgument

U32 = Annotated[int, Field(ge=0, le=2**32 - 1)]
I32 = Annotated[int, Field(ge=-(2**31) + 1, le=2**31 - 1)]
Texts = Annotated[list[str], Field(fail_fast=True)]
Ids = Annotated[list[U32], Field(fail_fast=True)]
Prompts = str | Texts | Ids | Annotated[list[Ids], Field(fail_fast=True)]

BLOCKS_TAG = "blocks"
"""Tag of a list of content blocks in a union: errors then name the block."""

MAX_PART_BYTES = 256 * 1024
MAX_PART_DEPTH = 100

T = TypeVar("T", bound=BaseModel)


def parse_body(
    cls: type[T],
    body: bytes,
    neutral: Mapping[str, tuple[Any, ...]],
    *,
    instead: Mapping[str, str] | None = None,
    translate: Callable[[Mapping[str, Any]], Mapping[str, Any]] = lambda fields: fields,
) -> tuple[T, Mapping[str, Any]]:
    """Parse a request body as `cls`; returns it and all fields.

    Raises InvalidArgument unless it is a JSON object with valid types. `neutral`: unsupported fields with the
    values that have no effect (None always has none); other values are refused, with what to send `instead`.
    `translate`: renames foreign fields to those of `cls`.
    """
    fields = translate(json_object(body))
    for name, allowed in neutral.items():
        value = fields.get(name)
        if value is not None and value not in allowed:
            advice = (instead or {}).get(name, "leave the field out")
            refuse(name, f"this value is not supported by this server; {advice}")
    try:
        return cls.model_validate(fields), fields
    except pydantic.ValidationError as error:
        raise _invalid(error) from None


def json_object(body: bytes) -> Mapping[str, Any]:
    """The body's fields. Raises InvalidArgument unless it is a JSON object."""
    try:
        fields = from_json(body, allow_inf_nan=False)
    except ValueError as error:
        raise InvalidArgument.field("body", f"is no JSON in UTF-8: {error}") from None
    if not isinstance(fields, dict):
        raise InvalidArgument.field("body", "is no JSON object")
    return fields


def _invalid(error: pydantic.ValidationError) -> InvalidArgument:
    """One violation per field; for a field with several possible types, the first type's message."""
    wrong = error.errors(include_url=False, include_context=False, include_input=False)
    first = {_path(entry["loc"]): entry["msg"] for entry in reversed(wrong)}
    violations = [FieldViolation(name, message) for name, message in first.items()]
    text = "; ".join(f"{v.field}: {v.description}" for v in violations)
    return InvalidArgument(text, reason="INVALID_FIELD", violations=violations)


def _path(location: tuple[int | str, ...]) -> str:
    """`messages[0].content` for an element of a list of objects, else only the field (the rest may be type names)."""
    match location:
        case (str() as name, int() as index, str() as inner, tag, int() as block, *rest) if tag == BLOCKS_TAG:
            return ".".join([f"{name}[{index}].{inner}[{block}]", *map(str, rest)])
        case (str() as name, int() as index, str() as inner, *_) if name in {"messages", "tools"}:
            return f"{name}[{index}].{inner}"
        case (name, *_):
            return str(name)
    return "body"


# --- parts -----------------------------------------------------------------------------------------------------------


def json_text(value: Any, field: str) -> str:
    """A free-form part as compact JSON. Raises InvalidArgument naming `field` beyond 256 KiB or 100 levels."""
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    if len(text.encode()) > MAX_PART_BYTES:
        refuse(field, f"has more than {MAX_PART_BYTES} bytes of JSON")
    if _is_deeper_than(MAX_PART_DEPTH, value):
        refuse(field, f"is nested more than {MAX_PART_DEPTH} levels deep")
    return text


def _is_deeper_than(depth: int, value: Any) -> bool:
    level = [value]
    for _ in range(depth + 1):
        level = [child for item in level for child in _children(item)]
        if not level:
            return False
    return True


def _children(value: Any) -> Iterable[Any]:
    if isinstance(value, dict):
        return value.values()
    return value if isinstance(value, list) else ()


def prompts_of(given: str | list[str] | list[int] | list[list[int]]) -> list[str | list[int]]:
    """Convert the prompt field to a list of texts or token ids."""
    if isinstance(given, str):
        return [given]
    token_ids = [item for item in given if isinstance(item, int)]
    return [token_ids] if token_ids else [item for item in given if not isinstance(item, int)]


def refuse(field: str, description: str) -> NoReturn:
    """Raise InvalidArgument for a field or value that this server does not support."""
    raise InvalidArgument(
        f"{field}: {description}", reason="UNSUPPORTED_FIELD", violations=[FieldViolation(field, description)]
    )


def unset_if_none(value: bool | None) -> bool:
    """The value of a message's bool field. None leaves it unset, as for other fields, but protobuf's stubs do not say so."""
    return value  # type: ignore[return-value]
