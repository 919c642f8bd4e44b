"""Scenario files: found, read, checked."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any


class ScenarioError(Exception):
    """The file is no scenario; the message names the field."""


@dataclass(frozen=True)
class Scenario:
    """One file: its input, and its trace where it has one."""

    path: Path
    name: str
    family: str
    config: dict[str, Any]
    data: dict[str, Any]

    @property
    def trace(self) -> list[dict[str, Any]] | None:
        """What the reference did; None for inputs without it."""
        return self.data.get("trace")

    @property
    def tags(self) -> list[str]:
        """Words about the scenario."""
        return self.data.get("tags", [])


def find(places: list[str]) -> list[Path]:
    """Scenario files below the places; files are taken as they are. ScenarioError for a place that does not exist."""
    found: list[Path] = []
    for place in map(Path, places):
        if not place.exists():
            raise ScenarioError(f"{place}: no such file or folder")
        found += sorted(place.rglob("*.json")) if place.is_dir() else [place]
    return found


def read(path: Path) -> Scenario:
    """Reads one file; ScenarioError when it is not one."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ScenarioError(f"not JSON: {error}") from error
    if not isinstance(data, dict) or not isinstance(data.get("family"), str):
        raise ScenarioError("field 'family' is missing")
    config = data.get("config", {})
    if not isinstance(config, dict):
        raise ScenarioError("field 'config' is no object")
    return Scenario(path, data.get("name", path.stem), data["family"], config, data)


def require_whole(scenario: Scenario, extra: set[str]) -> None:
    """ScenarioError for a field of the file, or of its aborts, that is missing or unknown. `extra`: what else the family has."""
    optional = {"name", "seed", "tags", "aborts", "trace", *extra}
    require(scenario.data, "file", {"family", "config", "requests"}, optional)
    for i, abort in enumerate(scenario.data.get("aborts", [])):
        require(abort, f"aborts[{i}]", {"step", "id"}, {"when"})


def require(value: dict[str, Any], where: str, required: set[str], optional: set[str]) -> None:
    """ScenarioError naming the first field of `value` that is missing or unknown."""
    for field in sorted(required - value.keys()):
        raise ScenarioError(f"field '{where}.{field}' is missing")
    for field in sorted(value.keys() - required - optional):
        raise ScenarioError(f"field '{where}.{field}' is unknown")
