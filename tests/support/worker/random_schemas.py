"""Random JSON schemas of bounded strings, arrays and depth, for tests of structured output: every output of them is finite."""

import random
import string
from collections.abc import Callable
from typing import Any

MAX_DEPTH = 3

_PATTERNS = ["^[a-z]{2,6}$", "^[A-Z][0-9]{1,3}$", "^(red|green|blue)-[0-9]$", "^[a-f]{2}(-[a-f]{2}){0,2}$"]
_WORDS = ["alpha", "beta", 'qu"ote', "日本語", "new\nline", "é", "a b", "\\"]
_FORMATS = ["date", "uuid", "ipv4"]


def random_schema(rng: random.Random, depth: int = 0) -> dict[str, Any]:
    """One schema; `depth`: of containers around it. Equal for equal states of `rng`."""
    kinds: list[Callable[[random.Random, int], dict[str, Any]]] = [_string, _integer, _enum, _constant]
    if depth < MAX_DEPTH:
        # An object at the top more often than not, as people ask for.
        kinds += [_object] * (8 if depth == 0 else 2) + [_array, _any_of, _reference]
    return rng.choice(kinds)(rng, depth)


def _string(rng: random.Random, _: int) -> dict[str, Any]:
    form = rng.randrange(4)
    if form == 0:
        return {"type": "string", "pattern": rng.choice(_PATTERNS)}
    if form == 1:
        return {"type": "string", "format": rng.choice(_FORMATS)}
    least = rng.randrange(4)
    return {"type": "string", "minLength": least, "maxLength": least + rng.randrange(8)}


def _integer(rng: random.Random, _: int) -> dict[str, Any]:
    least = rng.randrange(-1000, 1000)
    return {"type": "integer", "minimum": least, "maximum": least + rng.randrange(5000)}


def _enum(rng: random.Random, _: int) -> dict[str, Any]:
    return {"enum": rng.sample([*_WORDS, 1, 2.5, None, True, False], rng.randrange(1, 5))}


def _constant(rng: random.Random, _: int) -> dict[str, Any]:
    return {"const": rng.choice([*_WORDS, 17, None, {"a": [1, 2]}])}


def _object(rng: random.Random, depth: int) -> dict[str, Any]:
    names = rng.sample([*string.ascii_lowercase, *_WORDS], rng.randrange(1, 4))
    return {
        "type": "object",
        "properties": {name: random_schema(rng, depth + 1) for name in names},
        "required": [name for name in names if rng.random() < 0.7],
        "additionalProperties": False,
    }


def _array(rng: random.Random, depth: int) -> dict[str, Any]:
    least = rng.randrange(3)
    return {
        "type": "array",
        "items": random_schema(rng, depth + 1),
        "minItems": least,
        "maxItems": least + rng.randrange(3),
    }


def _any_of(rng: random.Random, depth: int) -> dict[str, Any]:
    return {"anyOf": [random_schema(rng, depth + 1) for _ in range(rng.randrange(1, 4))]}


def _reference(rng: random.Random, depth: int) -> dict[str, Any]:
    """An array of what `$defs` of this very schema say; only at the top, where the pointer begins."""
    if depth:
        return _array(rng, depth)
    return {
        "type": "array",
        "items": {"$ref": "#/$defs/item"},
        "maxItems": 2,
        "$defs": {"item": random_schema(rng, depth + 1)},
    }
