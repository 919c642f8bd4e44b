"""Forms of scenario files: fields, types and bounds. What a form refuses is named by its place in the file."""

from collections.abc import Iterable
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

Count = Annotated[int, Field(ge=0)]
Positive = Annotated[int, Field(ge=1)]
Tokens = list[Count]
_NO_OBJECT = {"model_type", "dict_type"}
_LONGEST_SHOWN = 60


class ScenarioError(Exception):
    """The file is no scenario; the message names the field."""


class Form(BaseModel):
    """No field is converted, none is unknown, numbers are finite."""

    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)


class File(Form):
    """What every file has."""

    family: str
    name: str = ""
    seed: int | None = None
    tags: list[str] = []


class AnyFile(File):
    """A file of whatever family: as much as is needed to know which."""

    model_config = ConfigDict(extra="ignore")

    config: dict[str, Any] = {}


def check(form: type[Form], value: Any, *place: str | int) -> None:
    """ScenarioError naming the first field of `value` that its form refuses. `place`: where in the file `value` is."""
    try:
        form.model_validate(value)
    except ValidationError as error:
        found = error.errors(include_url=False, include_context=False)[0]
        field = _named([*place, *found["loc"]])
        if found["type"] == "missing":
            raise ScenarioError(f"field '{field}' is missing") from error
        if found["type"] == "extra_forbidden":
            raise ScenarioError(f"field '{field}' is unknown") from error
        message = "Input should be an object" if found["type"] in _NO_OBJECT else found["msg"]
        raise refused(field, message, found["input"]) from error


def refused(field: str, message: str, given: Any) -> ScenarioError:
    """The error for a field's value."""
    shown = repr(given)
    shown = shown if len(shown) <= _LONGEST_SHOWN else f"{shown[:_LONGEST_SHOWN]}..."
    return ScenarioError(f"field '{field}': {message} (given: {shown})")


def _named(place: Iterable[str | int]) -> str:
    """`requests[0].prompt[3]`; what stands in the file itself is `file.requests`."""
    steps = list(place)
    if len(steps) <= 1:
        return ".".join(["file", *map(str, steps)])
    return "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in steps).removeprefix(".")
