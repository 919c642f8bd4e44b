"""Options made from the settings themselves: each has its setting's name, type, default and description.

Not here: options with other names or values than their settings (`--set`, `--record-memory`).
"""

import inspect
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any

import typer
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from quire.settings import Spelling, option_name, settings_of
from quire.sizes import GIB, parse_size, size_text

Panels = Mapping[str, Sequence[str]]
"""Fields by the help panel that their options are shown in."""

_SIZES, _DURATION_SUFFIX = {"_bytes": 1, "_gib": GIB}, "_s"
"""Units of settings that are sizes, by the end of their names."""


def options_of(
    *settings: type[BaseModel], panels: Panels, spelled: Spelling = option_name
) -> Callable[..., dict[str, Any]]:
    """A collector for `quire.cli.options.gathering.gathers`: {field: value} of the options that were given.

    Options with a text as default are always given. With several `settings` a field is described by the first
    that has it. `spelled`: the option's name of a field. The collector raises ConfigError for a malformed size.
    """

    def collect(**given: Any) -> dict[str, Any]:
        return {name: _value(name, value, spelled) for name, value in given.items() if value not in (None, "")}

    parts = [_parameter(settings, name, panel, spelled) for panel, names in panels.items() for name in names]
    collect.__signature__ = inspect.Signature(parts)  # type: ignore[attr-defined]
    return collect


def arguments_for(settings: type[BaseModel], given: Mapping[str, Any]) -> list[str]:
    """Those of `given` that are fields of `settings`, as arguments of the service. Raises ConfigError for invalid values."""
    own = {name: value for name, value in given.items() if name in settings.model_fields}
    settings_of(settings, option_name, **own)
    return as_arguments(own)


def as_arguments(given: Mapping[str, Any], spelled: Spelling = option_name) -> list[str]:
    """Values by field as arguments of the service, unchecked; a bool is a switch."""
    return [part for name, value in given.items() for part in _argument(spelled(name), _written(name, value))]


def _written(name: str, value: Any) -> Any:
    """A size in bytes, as a fraction of a larger unit may have an exponent, which sizes must not have."""
    unit = _size_unit(name)
    return f"{round(value * unit)}b" if unit > 1 else value


def _argument(option: str, value: Any) -> list[str]:
    if isinstance(value, bool):
        return [option if value else _negated(option)]
    return [option, str(value)]


def _negated(option: str) -> str:
    return f"--no-{option.removeprefix('--')}"


def _parameter(settings: Sequence[type[BaseModel]], name: str, panel: str, spelled: Spelling) -> inspect.Parameter:
    owners = [cls for cls in settings if name in cls.model_fields]
    field, option = owners[0].model_fields[name], spelled(name)
    kind = _written_as(name, field)
    default = field.default if kind is str and isinstance(field.default, str) else None
    made = typer.Option(
        f"{option}/{_negated(option)}" if kind is bool and field.default is not False else option,
        metavar=_metavar(name),
        help=" ".join([*str(field.description).split(), *([] if default else _defaults(name, owners))]),
        show_default=bool(default),
        rich_help_panel=panel,
    )
    annotation = Annotated[kind if default is not None else kind | None, made]  # type: ignore[valid-type]
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


def _written_as(name: str, field: FieldInfo) -> type:
    """The type of value that is written."""
    return str if _size_unit(name) else _plain_type(field.annotation)


def _size_unit(name: str) -> int:
    """Bytes of a plain number; 0 if the setting is no size."""
    return next((unit for suffix, unit in _SIZES.items() if name.endswith(suffix)), 0)


def _plain_type(annotation: Any) -> type:
    """int of `Annotated[int, ...] | None`, str of a Literal and of a union."""
    if types.NoneType in typing.get_args(annotation):
        annotation = next(part for part in typing.get_args(annotation) if part is not types.NoneType)
    if typing.get_origin(annotation) is typing.Literal:
        return str
    found = typing.get_args(annotation)[0] if typing.get_origin(annotation) is Annotated else annotation
    return str if typing.get_origin(found) in (typing.Union, types.UnionType) else typing.cast(type, found)


def _metavar(name: str) -> str | None:
    """The unit; None = that of the type."""
    if _size_unit(name):
        return "SIZE"
    if name == "max_model_len":
        return "TOKENS|auto"
    return "SECONDS" if name.endswith(_DURATION_SUFFIX) else None


def _defaults(name: str, owners: Sequence[type[BaseModel]]) -> list[str]:
    """A sentence; none where the description says what None means."""
    texts = {cls: _default_text(name, cls.model_fields[name].default) for cls in owners}
    if not all(texts.values()):
        return []
    if len(set(texts.values())) == 1:
        return [f"Default: {texts[owners[0]]}."]
    said = (f"{text} ({cls.__name__.removesuffix('Settings').lower()})" for cls, text in texts.items())
    return [f"Default: {', '.join(said)}."]


def _default_text(name: str, default: Any) -> str:
    """As it is written; empty for None and for a switch that is off."""
    if default is None or default is False:
        return ""
    if default is True:
        return "yes"
    if _size_unit(name) == 1:
        return size_text(default).replace(".0 ", "").replace(" ", "")
    return f"{default:g}" if isinstance(default, float) else str(default)


def _value(name: str, written: Any, spelled: Spelling) -> Any:
    """A size in the setting's unit; other values as they are."""
    if not (unit := _size_unit(name)):
        return written
    size = parse_size(written, spelled(name), plain_unit=unit)
    return size if unit == 1 else size / unit
