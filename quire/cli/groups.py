"""Groups of commands that import a command's module when it is run, so that `quire --help` and each service start quickly."""

import importlib
from typing import Any, ClassVar

import typer
from typer.core import TyperCommand, TyperGroup


class CommandGroup(TyperGroup):
    """A group with a table of (module, summary): its help imports nothing; a module's `app` is the command."""

    table: ClassVar[dict[str, tuple[str, str]]] = {}

    def __init__(self, **attributes: Any) -> None:
        super().__init__(**attributes)
        for name, (_, summary) in self.table.items():
            self.add_command(TyperCommand(name=name, help=summary, callback=None))

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Resolve the first argument to its command."""
        name, _, rest = super().resolve_command(ctx, args)
        return name, self._load(name), rest

    def _load(self, name: str | None) -> Any:
        module, _ = self.table[str(name)]
        command = typer.main.get_command(importlib.import_module(module).app)
        command.name = name
        return command


def new_app(*, completion: bool = False) -> typer.Typer:
    """A Typer for one command or group, with the common settings. `completion`: with the options that install shell completion."""
    return typer.Typer(
        rich_markup_mode="rich", add_completion=completion, pretty_exceptions_enable=False, no_args_is_help=False
    )
