"""Names that a model is served under: `--served-model-name A B`, as vLLM writes it, and what each service gets of it."""

from collections.abc import Sequence
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

_NAMES, _ALIAS = "--served-model-name", "--model-alias"

Aliases = Annotated[
    list[str] | None,
    typer.Option(
        _ALIAS,
        metavar="NAME",
        help="Further name under which requests may ask for the model; answers have its first name. Repeatable.",
        show_default=False,
        rich_help_panel="Model",
    ),
]


class NamesCommand(TyperCommand):
    """A command that takes several names after --served-model-name: those after the first are aliases."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """See the class."""
        return super().parse_args(ctx, with_aliases(args))


def with_aliases(arguments: Sequence[str]) -> list[str]:
    """`--served-model-name A B C` as `--served-model-name A --model-alias B --model-alias C`; the rest as it is."""
    found: list[str] = []
    num_names = -1  # given so far in the list; -1 = not in one
    for argument in arguments:
        num_names = 0 if argument == _NAMES else -1 if num_names < 0 or argument.startswith("-") else num_names + 1
        found += [_ALIAS, argument] if num_names > 1 else [argument]
    return found


def alias_arguments(aliases: Sequence[str] | None) -> list[str]:
    """The aliases as arguments of `quire serve gateway`."""
    return [part for alias in aliases or () for part in (_ALIAS, alias)]
