"""Compares a trace with a recording, field by field, and says where they part first."""

from dataclasses import dataclass
from typing import Any

_NOT_COMPARED = {"raw", "info"}


@dataclass(frozen=True)
class Difference:
    """The first place where two traces differ. `step`: of the scheduler, or the place in the list of operations."""

    step: int
    field: str
    expected: Any
    got: Any


def first_difference(expected: list[dict[str, Any]], got: list[dict[str, Any]]) -> Difference | None:
    """None where all compared fields of all steps are equal."""
    for index, (want, have) in enumerate(zip(expected, got, strict=False)):
        fields = (want.keys() | have.keys()) - _NOT_COMPARED
        if "error" in want:
            # What did not happen before it died, a recording may leave out or write as an empty list.
            fields = {field for field in fields if want.get(field) or have.get(field)}
        for field in sorted(fields):
            if found := _differ(field, want.get(field), have.get(field)):
                return Difference(want.get("step", index), *found)
    if len(expected) != len(got):
        return Difference(min(len(expected), len(got)), "number of steps", len(expected), len(got))
    return None


def _differ(path: str, want: Any, have: Any) -> tuple[str, Any, Any] | None:
    if isinstance(want, dict) and isinstance(have, dict):
        for key in sorted(want.keys() | have.keys(), key=str):
            if found := _differ(f"{path}.{key}", want.get(key), have.get(key)):
                return found
        return None
    return None if want == have else (path, want, have)
