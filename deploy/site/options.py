"""Options of commands as rows of a Markdown table."""

import enum
import re
import typing
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

_KINDS: Mapping[Any, str] = {int: "whole number", float: "number", Path: "path", str: "text"}
_MARKUP = re.compile(r"\[/?(bold|dim|italic)\]")


def option_table(options: Iterable[Any]) -> Iterator[str]:
    """The lines of a table of click options."""
    yield "| option | kind | default | meaning |\n|---|---|---|---|"
    for option in options:
        yield f"| {_names(option)} | {_kind(option)} | {_default(option)} | {_cell(option.help or '')} |"
    yield ""


def plain(text: str) -> str:
    """The text without the terminal's markup."""
    return _MARKUP.sub("", text)


def _cell(text: str) -> str:
    """Fits into a table: one line, no markup of the terminal, no bars."""
    return " ".join(plain(text).replace("|", "\\|").split())


def _names(option: Any) -> str:
    return ", ".join(f"`{name}`" for name in [*option.opts, *option.secondary_opts])


def _kind(option: Any) -> str:
    """What may be written: words, numbers between bounds, or another kind; from the annotation of the command's parameter."""
    wanted = option.type_descriptor.annotation
    parts = [part for part in typing.get_args(wanted) if part is not type(None)] or [wanted]
    if option.is_flag:
        return "switch"
    if isinstance(parts[0], type) and issubclass(parts[0], enum.Enum):
        return " \\| ".join(str(member.value) for member in parts[0])
    bounds = ["" if bound is None else f"{bound:g}" for bound in (option.min, option.max)]
    span = f" {bounds[0]}..{bounds[1]}" if any(bounds) else ""
    repeated = ", may be repeated" if option.multiple else ""
    return f"{_KINDS.get(parts[0], 'text')}{span}{repeated}"


def _default(option: Any) -> str:
    value = option.default
    if value is None or value in ((), [], ""):
        return ""
    if option.is_flag and option.secondary_opts:
        return "on" if value else "off"
    return "" if value is False else f"`{getattr(value, 'value', value)}`"
