"""Command lines found in files, checked against the real command line without running it."""

import re
import shlex
from collections.abc import Iterator, Sequence
from typing import Any

import typer

from quire.cli import app

_FENCE = re.compile(r"^```(?:sh|bash|console)\n(.*?)^```", re.M | re.S)


def parse_quire(arguments: Sequence[str]) -> str:
    """Parses `quire ARGUMENTS` as the real command would, and returns the command's full name; click's error if it would not."""
    command: Any = typer.main.get_command(app)
    names, rest = ["quire"], list(arguments)
    context = command.make_context("quire", rest)
    while hasattr(command, "resolve_command"):
        name, command, rest = command.resolve_command(context, rest)
        names.append(str(name))
        context = command.make_context(name, list(rest))
    return " ".join(names)


def shell_lines(markdown: str) -> Iterator[list[str]]:
    """Commands in the shell blocks of a Markdown text, as words; comments, continuations and quotes over lines are understood."""
    for block in _FENCE.findall(markdown):
        pending = ""
        for line in block.replace("\\\n", " ").splitlines():
            pending += line + "\n"
            try:
                words = shlex.split(pending, comments=True)
            except ValueError:  # a quote is still open
                continue
            pending = ""
            if words:
                yield words
        if pending:
            raise ValueError(f"a quote is never closed: {pending}")
