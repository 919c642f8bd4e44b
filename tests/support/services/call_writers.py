"""What models of each family write when they call tools, by their chat templates; independent of the parsers."""

import json
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

Call: TypeAlias = tuple[str, dict[str, Any]]
Writer: TypeAlias = Callable[[Sequence[Call], random.Random], str]

TOOLS: Mapping[str, dict[str, Any]] = {
    "get_weather": {
        "type": "object",
        "properties": {
            "city": {"type": "string"},
            "days": {"type": "integer"},
            "ratio": {"type": "number"},
            "is_metric": {"type": "boolean"},
            "where": {"type": "object"},
            "tags": {"$ref": "#/$defs/tags"},
            "note": {"anyOf": [{"type": "string"}, {"type": "null"}]},
            "anything": {},
        },
        "$defs": {"tags": {"type": "array"}},
    },
    "add": {"type": "object", "properties": {}},
    "ns.write-file": {
        "type": "object",
        "properties": {"path": {"enum": ["a", "b/c"]}, "content": {"type": ["string"]}},
    },
}
_TEXTS = (
    "x",
    "Zürich 😀",
    '"',
    "'",
    "\\",
    "\\n",
    "\n",
    "\n\n",
    " ",
    "\t",
    "<",
    "</",
    "</parameter",
    "<parameter=a>",
    "<arg_",
)
_TEXTS += (
    "{",
    "}",
    "[",
    "]",
    "(",
    ")",
    ",",
    ":",
    "=",
    "null",
    "5",
    "true",
    '{"a": 1}',
    "<tool_call>",
    "</tool",
    "`",
    "<|",
)
_WORDS = ("hello world", "it's", 'so "so"', "a: b, c", "</x>", "Zürich")


def random_calls(rng: random.Random, most: int = 3) -> list[Call]:
    """One to `most` calls."""
    return [_call(rng) for _ in range(rng.randint(1, most))]


def _call(rng: random.Random) -> Call:
    name = rng.choice(list(TOOLS))
    makers = {key: make for key, make in _MAKERS.items() if key in TOOLS[name]["properties"]}
    keys = [key for key in makers if rng.random() < 0.6]
    return name, {key: makers[key](rng) for key in keys}


def _text(rng: random.Random) -> str:
    return "".join(rng.choices(_TEXTS, k=rng.randint(0, 6)))


def _object(rng: random.Random, depth: int = 2) -> dict[str, Any]:
    return {rng.choice(("a", "b c", "é")): _any(rng, depth - 1) for _ in range(rng.randint(0, 2))}


def _any(rng: random.Random, depth: int = 2) -> Any:
    kind = rng.randrange(8 if depth else 5)
    if kind < 5:
        return (None, rng.random() < 0.5, rng.randint(-9, 10**9), rng.uniform(-1, 1e6), _text(rng))[kind]
    return _object(rng, depth) if kind == 5 else [_any(rng, depth - 1) for _ in range(rng.randint(0, 3))]


def _untyped(rng: random.Random) -> Any:
    """A value whose type its text shows."""
    value = _any(rng)
    return rng.choice(_WORDS) if isinstance(value, str) else value


_MAKERS: Mapping[str, Callable[[random.Random], Any]] = {
    "city": _text,
    "days": lambda rng: rng.randint(-5, 500),
    "ratio": lambda rng: rng.choice((0.5, -2, 1e20, 3)),
    "is_metric": lambda rng: rng.random() < 0.5,
    "where": _object,
    "tags": lambda rng: [_any(rng) for _ in range(rng.randint(0, 3))],
    "note": lambda rng: rng.choice((None, "5", "nil", '"', "true", "")),
    "anything": _untyped,
    "path": lambda rng: rng.choice(("a", "b/c")),
    "content": _text,
}


# --- JSON ------------------------------------------------------------------------------------------------------------


def _json(value: Any, rng: random.Random) -> str:
    return json.dumps(value, ensure_ascii=rng.random() < 0.5, indent=rng.choice((None, None, 2)))


def _object_of(call: Call, rng: random.Random, name: str = "name", arguments: str = "arguments", more: str = "") -> str:
    return f'{{{more}"{name}": "{call[0]}", "{arguments}": {_json(call[1], rng)}}}'


def _listed(before: str, after: str) -> Writer:
    return lambda calls, rng: f"{before}[{', '.join(_object_of(call, rng) for call in calls)}]{after}"


def _each(write: Callable[[Call, random.Random], str], between: str = "", before: str = "", after: str = "") -> Writer:
    return lambda calls, rng: before + between.join(write(call, rng) for call in calls) + after


def _hunyuan(calls: Sequence[Call], rng: random.Random) -> str:
    """A list, as Hunyuan writes it, or lines, as MiniMax M1 does."""
    lines = _each(_object_of, "\n", "<tool_calls>\n", "\n</tool_calls>")
    return rng.choice((_listed("<tool_calls>", "</tool_calls>"), lines))(calls, rng)


def _command(calls: Sequence[Call], rng: random.Random) -> str:
    objects = [
        _object_of(call, rng, "tool_name", "parameters", f'"tool_call_id": "{i}", ') for i, call in enumerate(calls)
    ]
    return "<|START_ACTION|>[\n    " + ",\n    ".join(objects) + "\n]<|END_ACTION|>"


def _kimi(calls: Sequence[Call], rng: random.Random) -> str:
    written = "".join(
        f"<|tool_call_begin|>functions.{name}:{i}<|tool_call_argument_begin|>{_json(arguments, rng)}<|tool_call_end|>"
        for i, (name, arguments) in enumerate(calls)
    )
    return f"<|tool_calls_section_begin|>{written}<|tool_calls_section_end|>"


def _harmony(calls: Sequence[Call], rng: random.Random) -> str:
    heads = (
        "<|channel|>commentary to=functions.{} <|constrain|>json<|message|>",
        "<|channel|>commentary to=functions.{}<|message|>",
        "<|channel|>analysis to=functions.{} code<|message|>",
        " to=functions.{}<|channel|>commentary json<|message|>",
    )
    written = [rng.choice(heads).format(name) + _json(arguments, rng) for name, arguments in calls]
    return "<|start|>assistant" + "<|call|><|start|>assistant".join(written) + rng.choice(("<|call|>", ""))


# --- tags ------------------------------------------------------------------------------------------------------------


def _plain(value: Any, rng: random.Random, close: str) -> str:
    """A value as templates write it: strings as they are, others as JSON, words also as Python's."""
    if isinstance(value, str):
        return value.replace(close, "")
    words = isinstance(value, bool) and rng.random() < 0.5
    return str(value) if words else _json(value, rng)


def _tagged(
    head: str, key: str, close: str, tail: str, pad: str = "", gap: str = "\n"
) -> Callable[[Call, random.Random], str]:
    def write(call: Call, rng: random.Random) -> str:
        values = "".join(
            key.format(name, str(isinstance(value, str)).lower()) + pad + _plain(value, rng, close) + pad + close + gap
            for name, value in call[1].items()
        )
        return head.format(call[0]) + values + tail

    return write


def _qwen(opening: str, end: str, pad: str) -> Writer:
    write = _tagged(f"{opening}\n<function={{}}>\n", "<parameter={}>", "</parameter>", f"</function>\n{end}", pad)
    return _each(write, "\n")


_DSML = "｜DSML｜"


# --- literals --------------------------------------------------------------------------------------------------------


def _python(call: Call, rng: random.Random) -> str:
    return f"{call[0]}({', '.join(f'{key}={value!r}' for key, value in call[1].items())})"


def _gemma(delimiter: str) -> Callable[[Call, random.Random], str]:
    def value_of(value: Any) -> str:
        if isinstance(value, dict):
            return "{" + ",".join(f"{delimiter}{key}{delimiter}:{value_of(item)}" for key, item in value.items()) + "}"
        if isinstance(value, list):
            return "[" + ",".join(map(value_of, value)) + "]"
        return delimiter + value + delimiter if isinstance(value, str) else json.dumps(value)

    def write(call: Call, rng: random.Random) -> str:
        return f"call:{call[0]}" + "{" + ",".join(f"{key}:{value_of(value)}" for key, value in call[1].items()) + "}"

    return write


def _around(
    before: str, write: Callable[[Call, random.Random], str], after: str
) -> Callable[[Call, random.Random], str]:
    return lambda call, rng: before + write(call, rng) + after


_DEEPSEEK_V3 = _around(
    "",
    lambda call, rng: f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{call[0]}\n```json\n{_json(call[1], rng)}\n```",
    "<｜tool▁call▁end｜>",
)
_DEEPSEEK_V31 = _around(
    "<｜tool▁call▁begin｜>", lambda call, rng: f"{call[0]}<｜tool▁sep｜>{_json(call[1], rng)}", "<｜tool▁call▁end｜>"
)
_STEP3 = _around(
    "<｜tool_call_begin｜>function<｜tool_sep｜>",
    _tagged(
        '<steptml:invoke name="{}">',
        '<steptml:parameter name="{}">',
        "</steptml:parameter>",
        "</steptml:invoke>",
        gap="",
    ),
    "<｜tool_call_end｜>",
)
_MINIMAX = _tagged('<invoke name="{}">\n', '<parameter name="{}">', "</parameter>", "</invoke>\n")
_DEEPSEEK_V32 = _tagged(
    f'<{_DSML}invoke name="{{}}">\n',
    f'<{_DSML}parameter name="{{}}" string="{{}}">',
    f"</{_DSML}parameter>",
    f"</{_DSML}invoke>\n",
)
_GLM = _tagged("<tool_call>{}\n", "<arg_key>{}</arg_key>\n<arg_value>", "</arg_value>", "</tool_call>")

WRITERS: Mapping[str, Writer] = {
    "hermes": _each(_around("<tool_call>\n", _object_of, "\n</tool_call>"), "\n"),
    "llama3": _each(lambda call, rng: _object_of(call, rng, arguments="parameters"), "; "),
    "granite": _listed("<|tool_call|>", ""),
    "phi4": lambda calls, rng: _listed(*rng.choice((("functools", ""), ("<|tool_call|>", "<|/tool_call|>"))))(
        calls, rng
    ),
    "command": _command,
    "hunyuan": _hunyuan,
    "nemotron": _listed("<TOOLCALL>", "</TOOLCALL>"),
    "mistral": _listed("[TOOL_CALLS]", ""),
    "mistral-args": _each(lambda call, rng: f"[TOOL_CALLS]{call[0]}[ARGS]{_json(call[1], rng)}"),
    "deepseek-v3": _each(_DEEPSEEK_V3, "\n", "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"),
    "deepseek-v3.1": _each(_DEEPSEEK_V31, "", "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"),
    "kimi-k2": _kimi,
    "harmony": _harmony,
    "qwen3-coder": _qwen("<tool_call>", "</tool_call>", "\n"),
    "glm": _each(_GLM, "\n"),
    "minimax-m2": _each(_MINIMAX, "", "<minimax:tool_call>\n", "</minimax:tool_call>"),
    "seed-oss": _qwen("<seed:tool_call>", "</seed:tool_call>", ""),
    "deepseek-v3.2": _each(_DEEPSEEK_V32, "", f"<{_DSML}function_calls>\n", f"</{_DSML}function_calls>"),
    "deepseek-v4": _each(_DEEPSEEK_V32, "", f"<{_DSML}tool_calls>\n", f"</{_DSML}tool_calls>"),
    "step3": _each(_STEP3, "", "<｜tool_calls_begin｜>", "<｜tool_calls_end｜>"),
    "llama4": _each(_python, ", ", "[", "]"),
    "olmo3": _each(_python, "\n", "<function_calls>\n", "\n</function_calls>"),
    "lfm2": _each(_python, ", ", "<|tool_call_start|>[", "]<|tool_call_end|>"),
    "gemma3": _each(_python, "\n", "```tool_code\n", "\n```"),
    "gemma4": _each(_around("<|tool_call>", _gemma('<|"|>'), "<tool_call|>")),
    "functiongemma": _each(_around("<start_function_call>", _gemma("<escape>"), "<end_function_call>")),
}
