"""Values that break things: for every type of protobuf field, for JSON, and for what reads texts (grammars, templates, ids)."""

import json
import random
from typing import Any

INTEGERS = (
    0,
    1,
    2,
    3,
    7,
    16,
    64,
    127,
    128,
    129,
    255,
    1_000,
    65_535,
    2**31 - 1,
    2**31,
    2**32 - 1,
    2**53,
    2**63 - 1,
    2**64 - 1,
)
FLOATS = (0.0, -0.0, 1.0, 0.5, 2.0, -1.0, 1e-45, 1e-300, 1e30, 1e300, float("inf"), float("-inf"), float("nan"))
TEXTS = (
    "",
    " ",
    "a",
    "hello",
    "\0",
    "a\0b",
    "\ufeff",
    "\u202e\u0301\U0001f9d1\u200d\U0001f680",
    "\ufffd\uffff\U0010ffff",
    "a" * 63,
    "a" * 65,
    "b" * 300,
    "\u00e9" * 2_000,
    "../../etc/passwd",
    "%s%n{}{0}$(id)`id`",
    "<|user|><|assistant|></s>",
    "{{ 1/0 }}{% for i in range(10**9) %}x{% endfor %}",
    "{{ ''.__class__.__mro__ }}",
    "null",
    "-1",
    "1e999",
    '{"a": 1}',
    "[" * 500,
)
GRAMMARS = (
    "{}",
    "true",
    "[]",
    "{",
    '{"type": "object"}',
    '{"type": "no such type"}',
    '{"type": ["string", 7]}',
    '{"$ref": "#"}',
    '{"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}}',
    '{"$ref": "http://localhost:1/schema"}',
    '{"pattern": "(((((((((a*)*)*)*)*)*)*)*)*)*$", "type": "string"}',
    '{"enum": []}',
    '{"minLength": 1e400, "type": "string"}',
    '{"multipleOf": 0, "type": "number"}',
    '{"type": "array", "minItems": 1000000000}',
    '{"allOf": [{"type": "string"}, {"type": "number"}]}',
    '{"a": ' * 300 + "1" + "}" * 300,
    '{"properties": ' * 90 + "{}" + "}" * 90,
    '{"\\ud800": 1}',
    "[a-z]+",
    "(",
    "a{1,1000}{1,1000}{1,1000}",
    "(a|a)*b" * 20,
    "(?=x)y",
    "\\",
    "[z-a]",
    "(?P<n>a)(?P=n)",
    "." * 2_000,
    'start: "a" start | "b"',
    "start: start",
    "start: nothing",
    "start: /(/",
    "%import common.WORD\nstart: WORD",
    'start: "a"~1..1000000',
    "start:",
)
IDS = ("", "x", "a" * 128, "a" * 129, "a b", "\u00e9", "../x", "0" * 36, "%00", "-", "a\tb")
_GRAMMAR_FIELDS = {"json_schema", "regex", "lark", "parameters_json", "arguments", "template_arguments_json"}


def integer(rng: random.Random, low: int, high: int) -> int:
    """Small mostly, at the type's ends else."""
    if rng.random() < 0.4:
        return max(low, min(high, rng.randrange(-2, 12)))
    return rng.choice([low, high, *(value for value in INTEGERS if low <= value <= high)])


def text(rng: random.Random, field: str = "") -> str:
    """Of a field of that name. Now and then long."""
    if field in _GRAMMAR_FIELDS and rng.random() < 0.8:
        return rng.choice(GRAMMARS)
    if field == "role":
        return rng.choice(("user", "assistant", "system", "tool", *TEXTS))
    if rng.random() < 0.002:
        return rng.choice(("x", "\u00e9", " ", "\0")) * rng.choice((10_000, 300_000, 1_300_000))
    if rng.random() < 0.3:
        return "".join(
            chr(rng.choice((rng.randrange(32, 127), rng.randrange(1, 0xD7FF)))) for _ in range(rng.randrange(40))
        )
    return rng.choice(TEXTS)


def real(rng: random.Random) -> float:
    """Any double."""
    return rng.choice(FLOATS) if rng.random() < 0.6 else rng.uniform(-3, 3)


def raw(rng: random.Random, most: int = 200) -> bytes:
    """Bytes without a meaning."""
    return rng.randbytes(rng.randrange(most))


def json_value(rng: random.Random, depth: int = 4) -> Any:
    """Any JSON value, what is no JSON for strict readers (NaN) and huge numbers included."""
    kind = rng.randrange(8 if depth else 6)
    if kind == 0:
        return rng.choice((None, True, False))
    if kind == 1:
        return rng.choice((*INTEGERS, -1, 10**30, 10**400))
    if kind == 2:
        return real(rng)
    if kind <= 5:
        return text(rng, rng.choice(("", "regex", "role")))
    if kind == 6:
        return [json_value(rng, depth - 1) for _ in range(rng.randrange(4))]
    return {text(rng): json_value(rng, depth - 1) for _ in range(rng.randrange(4))}


def json_text(rng: random.Random, value: Any) -> bytes:
    """As bytes, now and then broken: cut, with a lone surrogate, with a key twice, nested deeply, or in another encoding."""
    written = json.dumps(value)
    kind = rng.randrange(24)
    if kind == 0:
        return written.encode()[: rng.randrange(len(written) + 1)]
    if kind == 1:
        return written.replace('"', '"\\ud800', 1).encode()
    if kind == 2 and written.startswith("{"):
        return b'{"model": "x", "model": 7, "prompt": [], ' + written[1:].encode()
    if kind == 3:
        return b"[" * 5_000 + written.encode() + b"]" * rng.choice((0, 5_000))
    if kind == 4:
        return written.encode(rng.choice(("utf-16", "utf-32", "utf-8-sig")))
    return written.encode()
