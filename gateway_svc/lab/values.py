"""JSON of the lab's values: dataclasses become objects of their fields, without being copied first."""

import json
from dataclasses import fields
from typing import Any

from starlette.responses import Response


def encode(value: Any) -> bytes:
    """Encode `value` as JSON."""
    return json.dumps(value, default=_fields_of, ensure_ascii=False, separators=(",", ":")).encode()


def answer(value: Any) -> Response:
    """Make a route's response from `value`."""
    return Response(encode(value), media_type="application/json")


def _fields_of(value: Any) -> dict[str, Any]:
    return {field.name: getattr(value, field.name) for field in fields(value)}
