"""Scenario files: found, read, checked."""

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.golden.forms import AnyFile, ScenarioError, check

_MOST_STEPS = 100_000


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

    def steps(self) -> Iterator[int]:
        """Steps from 0. ScenarioError after a tenth more and 1,000 more than the reference took, or 100,000 without a trace."""
        most = _MOST_STEPS if self.trace is None else len(self.trace) * 11 // 10 + 1_000
        yield from range(most)
        raise ScenarioError(
            f"has not ended after {most} steps; the reference took {len(self.trace or ()) or 'no trace'}"
        )

    @property
    def tags(self) -> list[str]:
        """Words about the scenario."""
        return self.data.get("tags", [])


def find(places: list[str]) -> list[Path]:
    """Scenario files below the places; files are taken as they are, each once. ScenarioError for a place that does not exist."""
    found: list[Path] = []
    for place in map(Path, places):
        if not place.exists():
            raise ScenarioError(f"{place}: no such file or folder")
        found += sorted(path for path in place.rglob("*.json") if path.is_file()) if place.is_dir() else [place]
    return list({os.path.abspath(path): path for path in reversed(found)}.values())[::-1]


def read(path: Path) -> Scenario:
    """Reads one file; ScenarioError when it is not one."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ScenarioError(f"not JSON: {error}") from error
    check(AnyFile, data)
    return Scenario(path, data.get("name", path.stem), data["family"], data.get("config", {}), data)
