"""What a chat template, or Jinja, says when it refuses a conversation, without what it quotes of that (operations.md 5)."""

import re

import jinja2.nodes

_QUOTED = re.compile(r"'([^']*)'|\"([^\"]*)\"")
_TYPES = frozenset(
    {"dict object", "list object", "str object", "int object", "dict", "list", "str", "int", "float", "NoneType"}
)
_ABOUT_TYPES = (jinja2.UndefinedError, AttributeError, TypeError)
"""Errors that speak of names and types; others speak of values."""
_LEFT_OUT = "(what it says is left out: it may quote them)"


class TemplateWords:
    """What may be told of one template's errors: its own words. `parsed`: its `source` as Jinja reads it."""

    def __init__(self, source: str, parsed: jinja2.nodes.Template) -> None:
        self._source = source
        found = (node.value for node in parsed.find_all(jinja2.nodes.Const) if isinstance(node.value, str))
        self._constants = sorted({value for value in found if value.strip()}, key=len, reverse=True)

    def of_refusal(self, message: str) -> str:
        """For `raise_exception`: whole where the template has it so, else its beginning as far as the template has that."""
        for constant in self._constants:
            if message.startswith(constant):
                return message if message == constant else f"{constant.rstrip()} …"
        return _LEFT_OUT

    def of_error(self, error: Exception) -> str:
        """For what the interpreter says: errors about types whose quotes are of the template."""
        message, name = str(error), type(error).__name__
        quoted = [one or other for one, other in _QUOTED.findall(message)]
        own = isinstance(error, _ABOUT_TYPES) and all(
            word in _TYPES or (word and word in self._source) for word in quoted
        )
        return f"{name}: {message}" if own else f"{name} {_LEFT_OUT}"
