"""Chat templates: the model's Jinja source, rendered as in transformers.

Rendering is sandboxed, with limits on time and output size. Errors quote only the template (`TemplateWords`).
"""

import json
import re
import sys
import time
from collections.abc import Mapping, Sequence
from datetime import datetime
from types import FrameType
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from svc_common.errors import FailedPrecondition, InvalidArgument

MAX_RENDER_S = 2.0
MAX_OUTPUT_CHARS = 8 * 2**20
_INTERPRETER_ERRORS = (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError)
_QUOTED = re.compile(r"'([^']*)'|\"([^\"]*)\"")
_TYPES = frozenset(
    {"dict object", "list object", "str object", "int object", "dict", "list", "str", "int", "float", "NoneType"}
)
_ABOUT_TYPES = (jinja2.UndefinedError, AttributeError, TypeError)
"""Errors about names and types; others are about values."""
_LEFT_OUT = "(what it says is left out: it may quote them)"


class _RefusedError(jinja2.TemplateError):
    """Raised by the template's `raise_exception`."""


class _OverBoundError(jinja2.TemplateError):
    """Rendering took too long or produced too much."""


class ChatTemplate:
    """One compiled template. `special_tokens`: names that the template may use, such as `bos_token`.

    Raises FailedPrecondition if the source is no valid template.
    """

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        self._special_tokens = dict(special_tokens)
        try:
            environment = _environment()
            self._template = environment.from_string(source)
            self._words = TemplateWords(source, environment.parse(source))
        except jinja2.TemplateError as error:
            raise FailedPrecondition(
                f"the model's chat template does not compile: {error}", reason="BAD_CHAT_TEMPLATE"
            ) from error

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """Render the prompt for `messages`, which may call `tools`; both in OpenAI's form.

        `variables`: further template variables. `continue_final_message`: the prompt ends with the last
        message's text, so that the answer continues it. Raises InvalidArgument naming `messages` if the
        template refuses them, takes too long, or does not show that text.
        """
        given = {
            "documents": None,
            **self._special_tokens,
            **(variables or {}),
            "messages": [dict(message) for message in messages],
            "tools": tools,
            "add_generation_prompt": add_generation_prompt,
        }
        try:
            with _TimeLimit(MAX_RENDER_S):
                prompt = self._bounded(given)
            prompt.encode()  # a template may write a lone surrogate, which is not valid text
        except _RefusedError as error:
            raise _refused(self._words.of_refusal(str(error))) from error
        except _OverBoundError as error:
            raise _refused(str(error)) from error
        except (jinja2.TemplateError, *_INTERPRETER_ERRORS) as error:
            raise InvalidArgument.field(
                "messages", f"do not fit the chat template: {self._words.of_error(error)}"
            ) from error
        return _left_open(prompt, messages[-1]["content"]) if continue_final_message else prompt

    def _bounded(self, given: Mapping[str, Any]) -> str:
        parts: list[str] = []
        size = 0
        for part in self._template.generate(given):
            size += len(part)
            if size > MAX_OUTPUT_CHARS:
                raise _OverBoundError(f"it makes more than {MAX_OUTPUT_CHARS} characters of them")
            parts.append(part)
        return "".join(parts)


class _TimeLimit:
    """Context that ends its code with an _OverBoundError after `limit_s`.

    It also ends loops without output; Jinja has no such limit.
    """

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self._deadline = 0.0
        self._previous: Any = None

    def __enter__(self) -> None:
        self._deadline = time.monotonic() + self._limit_s
        self._previous = sys.gettrace()
        if self._previous is None:
            sys.settrace(self._trace)

    def __exit__(self, *_: object) -> None:
        if self._previous is None:
            sys.settrace(None)

    def _trace(self, frame: FrameType, event: str, arg: object) -> Any:
        if time.monotonic() > self._deadline:
            raise _OverBoundError(f"it ran longer than {self._limit_s:g} s")
        return self._trace


class _GenerationTag(jinja2.ext.Extension):
    """Transparent `{% generation %}...{% endgeneration %}`, which marks training targets in templates."""

    tags = {"generation"}  # noqa: RUF012 (declared so by Jinja)

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        """Return the body's nodes."""
        next(parser.stream)
        return list(parser.parse_statements(("name:endgeneration",), drop_needle=True))


def _environment() -> ImmutableSandboxedEnvironment:
    """Jinja environment as in transformers: block trimming, loop controls, three helpers."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON filter without the HTML escaping of Jinja's own, since a prompt is not HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    raise _RefusedError(message)


def _left_open(prompt: str, last: str) -> str:
    """Cut the prompt after the last message's text, as transformers does; templates may trim that text."""
    begin = prompt.rfind(last.strip())
    if not last.strip() or begin < 0:
        raise InvalidArgument.field(
            "continue_final_message", "needs a last message with text that the chat template shows as it is"
        )
    kept = last.lstrip()
    return prompt[: begin + len(kept if prompt.startswith(kept, begin) else last.strip())]


def _refused(why: str) -> InvalidArgument:
    return InvalidArgument.field("messages", f"refused by the chat template: {why}")


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)


class TemplateWords:
    """Filter that keeps only a template's own words in its errors. `parsed`: its `source` as parsed by Jinja."""

    def __init__(self, source: str, parsed: jinja2.nodes.Template) -> None:
        self._source = source
        found = (node.value for node in parsed.find_all(jinja2.nodes.Const) if isinstance(node.value, str))
        self._constants = sorted({value for value in found if value.strip()}, key=len, reverse=True)

    def of_refusal(self, message: str) -> str:
        """Filter a `raise_exception` message.

        It is kept if it is a constant of the template, else only a prefix that is.
        """
        for constant in self._constants:
            if message.startswith(constant):
                return message if message == constant else f"{constant.rstrip()} …"
        return _LEFT_OUT

    def of_error(self, error: Exception) -> str:
        """Filter an interpreter error: keep errors about types, if all words quoted are from the template."""
        message, name = str(error), type(error).__name__
        quoted = [one or other for one, other in _QUOTED.findall(message)]
        own = isinstance(error, _ABOUT_TYPES) and all(
            word in _TYPES or (word and word in self._source) for word in quoted
        )
        return f"{name}: {message}" if own else f"{name} {_LEFT_OUT}"
