"""Checks of the fields of a quantization_config. Does not import torch."""

from collections.abc import Collection, Mapping
from typing import Any

from worker_svc.model.formats.forms import UnsupportedWeights

Allowed = Mapping[str, Collection[object] | None]
"""Values that a field may have by its name; None = any, since the weights do not depend on it."""


def check_fields(given: Mapping[str, Any], allowed: Allowed, what: str) -> None:
    """Raise UnsupportedWeights for a field that is not allowed and not empty, or that has another value than allowed.

    `what`: the weights or part of quantization_config that is described.
    """
    for field, value in given.items():
        values = allowed.get(field, ())
        if values is not None and value not in (None, [], {}) and value not in list(values):
            raise refused(what, field, value, values)


def refused(what: str, field: str, value: object, values: Collection[object] = ()) -> UnsupportedWeights:
    """The error for a field's value; `values`: those that are supported."""
    shown = f": {' and '.join(map(repr, values))} {'are' if len(values) > 1 else 'is'} supported" if values else ""
    return UnsupportedWeights(
        f"has {what} with {field}={value!r} in quantization_config, which is not supported{shown}"
    )


def choice(given: Mapping[str, Any], field: str, values: Collection[object], what: str) -> Any:
    """Value of a field, one of these. Raises UnsupportedWeights for another, or if it is missing."""
    value = given.get(field)
    if value not in list(values) or isinstance(value, bool) != any(isinstance(one, bool) for one in values):
        raise refused(what, field, value, values)
    return value


def group_size(given: Mapping[str, Any], field: str, what: str) -> int:
    """Depths of a group, 0 = all of them, which configurations call -1."""
    value = given.get(field)
    if not isinstance(value, int) or isinstance(value, bool) or not (value > 0 or value == -1):
        raise UnsupportedWeights(
            f"has {what} with {field}={value!r} in quantization_config: it must be a number of weights, or -1 for all"
        )
    return max(value, 0)
