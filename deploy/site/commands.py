"""The page of every command of `quire`, made from the commands themselves."""

import re
import textwrap
from collections.abc import Iterator
from typing import Any

import typer

from deploy.site.options import option_table, plain
from quire.cli import app

_INTRODUCTION = """\
# Commands

Every command of `quire` with its options, made from the commands themselves when the site is built. [The command
line](../cli.md) teaches the most used ones. Options of `quire up` and `quire serve` are on the page of
[configuration](../configuration.md).
"""
_ON_THEIR_OWN_PAGE = ("quire up", "quire serve")
_BOLD = re.compile(r"\[bold\](.*?)\[/bold\]")


def commands_page() -> str:
    """The page."""
    return "\n".join([_INTRODUCTION, *_sections(typer.main.get_command(app), "quire")])


def _sections(group: Any, name: str) -> Iterator[str]:
    for child in getattr(group, "table", getattr(group, "commands", {})):
        _, command, _ = group.resolve_command(group.make_context(name, [child], resilient_parsing=True), [child])
        yield from _section(command, f"{name} {child}")
        yield from _sections(command, f"{name} {child}")


def _section(command: Any, name: str) -> Iterator[str]:
    arguments = [param for param in command.params if param.param_type_name == "argument"]
    options = [
        param for param in command.params if param not in arguments and not param.hidden and param.name != "help"
    ]
    yield f"## {name}\n"
    yield from _help(command.help or "")
    if arguments:
        yield "| argument | meaning |\n|---|---|"
        yield from (f"| `{(param.metavar or param.name).upper()}` | {param.help or ''} |" for param in arguments)
        yield ""
    if options and not name.startswith(_ON_THEIR_OWN_PAGE):
        yield from option_table(options)


def _help(text: str) -> Iterator[str]:
    """Paragraphs of a help text; examples are blocks of code."""
    for paragraph in text.replace("\b", "").strip().split("\n\n"):
        is_example = paragraph.startswith(("[bold]", "  "))
        marked = paragraph if is_example else _BOLD.sub(r"`\1`", paragraph)
        lines = plain(textwrap.dedent(marked.strip("\n")))
        yield f"```text\n{lines}\n```\n" if is_example else f"{lines}\n"
