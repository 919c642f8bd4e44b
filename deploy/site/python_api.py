"""The page of the Python API: what `quire.__all__` names, for mkdocstrings to fill from docstrings."""

import quire

_INTRODUCTION = """\
# Python API

What `from quire import ...` offers, made from docstrings and signatures when the site is built.
"""
_FIRST = ("LLM", "SamplingParams", "Client", "AsyncClient")


def python_page() -> str:
    """The page, with the usual entries first."""
    others = sorted(name for name in quire.__all__ if name not in _FIRST and not name.startswith("__"))
    return "\n".join([_INTRODUCTION, *(f"::: {_home(name)}\n" for name in (*_FIRST, *others))])


def _home(name: str) -> str:
    """The full name where it is defined; the package itself loads names when they are used."""
    return f"{quire._HOMES[name]}.{name}"
