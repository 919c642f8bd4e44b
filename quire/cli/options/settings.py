"""Options made from the settings themselves: each has its setting's name, kind, default and explanation, so none is left out.

Not here: options whose words differ from the settings' (`--set`, `--record-memory`), and those known from vLLM.
"""

import inspect
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any

import typer
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from quire.settings import option_name, settings_of
from quire.sizes import parse_size, size_text

Panels = Mapping[str, Sequence[str]]
"""Fields by the help panel that their options are shown in."""

_SIZE_SUFFIX, _DURATION_SUFFIX = "_bytes", "_s"


def options_of(*settings: type[BaseModel], panels: Panels) -> Callable[..., dict[str, Any]]:
    """A collector for `quire.cli.options.gathering.gathers`: makes {field: value} of the options that were given.

    With several `settings` a field is explained by the first that has it. ConfigError from the collector for a size that is none.
    """

    def collect(**given: Any) -> dict[str, Any]:
        return {name: _value(name, value) for name, value in given.items() if value is not None}

    parts = [_parameter(settings, name, panel) for panel, names in panels.items() for name in names]
    collect.__signature__ = inspect.Signature(parts)  # type: ignore[attr-defined]
    return collect


def arguments_for(settings: type[BaseModel], given: Mapping[str, Any]) -> list[str]:
    """What of `given` is a setting of these, as arguments of the service. ConfigError for values that cannot be."""
    own = {name: value for name, value in given.items() if name in settings.model_fields}
    settings_of(settings, option_name, **own)
    return [part for name, value in own.items() for part in (option_name(name), str(value))]


def switches_for(given: Mapping[str, bool | None]) -> list[str]:
    """Switches by name as arguments of the service; nothing for what nobody chose."""
    return [f"--{name}" if is_on else f"--no-{name}" for name, is_on in given.items() if is_on is not None]


def _parameter(settings: Sequence[type[BaseModel]], name: str, panel: str) -> inspect.Parameter:
    owners = [cls for cls in settings if name in cls.model_fields]
    field = owners[0].model_fields[name]
    option = typer.Option(
        option_name(name),
        metavar=_metavar(name),
        help=" ".join([str(field.description), *_defaults(name, owners)]),
        show_default=False,
        rich_help_panel=panel,
    )
    kind = Annotated[_written_as(name, field) | None, option]  # type: ignore[valid-type]
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=kind)


def _written_as(name: str, field: FieldInfo) -> type:
    """The kind of value that people write."""
    return str if name.endswith(_SIZE_SUFFIX) else _plain_type(field.annotation)


def _plain_type(annotation: Any) -> type:
    """int of `Annotated[int, ...] | None`."""
    if isinstance(annotation, types.UnionType):
        annotation = next(part for part in typing.get_args(annotation) if part is not types.NoneType)
    found = typing.get_args(annotation)[0] if typing.get_origin(annotation) is Annotated else annotation
    return typing.cast(type, found)


def _metavar(name: str) -> str | None:
    """The unit; None = what the kind says."""
    if name.endswith(_SIZE_SUFFIX):
        return "SIZE"
    return "SECONDS" if name.endswith(_DURATION_SUFFIX) else None


def _defaults(name: str, owners: Sequence[type[BaseModel]]) -> list[str]:
    """A sentence; none where the explanation says what None means."""
    texts = {cls: _default_text(name, cls.model_fields[name].default) for cls in owners}
    if not all(texts.values()):
        return []
    if len(set(texts.values())) == 1:
        return [f"Default: {texts[owners[0]]}."]
    said = (f"{text} ({cls.__name__.removesuffix('Settings').lower()})" for cls, text in texts.items())
    return [f"Default: {', '.join(said)}."]


def _default_text(name: str, default: Any) -> str:
    """As people write it."""
    if default is None:
        return ""
    if name.endswith(_SIZE_SUFFIX):
        return size_text(default).replace(".0 ", "").replace(" ", "")
    return f"{default:g}" if isinstance(default, float) else str(default)


def _value(name: str, written: Any) -> Any:
    return parse_size(written, option_name(name)) if name.endswith(_SIZE_SUFFIX) else written
