"""Error texts of chat templates and Jinja, without text quoted from the conversation."""

import re

import jinja2.nodes

_QUOTED = re.compile(r"'([^']*)'|\"([^\"]*)\"")
_TYPES = frozenset(
    {"dict object", "list object", "str object", "int object", "dict", "list", "str", "int", "float", "NoneType"}
)
_ABOUT_TYPES = (jinja2.UndefinedError, AttributeError, TypeError)
"""Errors about names and types; others are about values."""
_LEFT_OUT = "(what it says is left out: it may quote them)"


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
