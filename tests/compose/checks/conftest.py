"""The stack as the checks need it: started when the first one asks, exchanged when one asks for another setup, ended at the end."""

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.compose.stack import Setup, Stack
from tests.support.commands import Failure

FIGURES_VARIABLE = "QUIRE_COMPOSE_FIGURES"


class Figures:
    """What the checks measured; written for tests.compose when they are over."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._values: dict[str, Any] = {}

    def note(self, name: str, value: Any) -> None:
        """Written at once: a check that fails later loses nothing."""
        self._values[name] = round(value, 2) if isinstance(value, float) else value
        self._path.write_text(json.dumps(self._values), encoding="utf-8")


class Stacks:
    """At most one stack at a time: the doors' ports are fixed."""

    def __init__(self, figures: Figures) -> None:
        self._figures = figures
        self._current: Stack | None = None
        self._failures: dict[str, Failure] = {}

    def need(self, name: str, setup: Setup) -> Stack:
        """The stack of `setup`, from nothing if it is not up already; one that does not come up is not tried again."""
        if name in self._failures:
            raise self._failures[name]
        if self._current is None or self._current.setup != setup:
            self.end()
            self._current = self._up(name, Stack(setup))
        return self._current

    def _up(self, name: str, stack: Stack) -> Stack:
        try:
            self._figures.note(f"up_{name}_s", stack.up())
        except Failure as failure:
            self._failures[name] = failure
            raise
        return stack

    def end(self) -> float:
        """Seconds that `down` took."""
        took_s = (self._current or Stack(Setup())).down()
        self._current = None
        return took_s


@pytest.fixture(scope="session")
def figures() -> Figures:
    """To note what was measured."""
    return Figures(Path(os.environ[FIGURES_VARIABLE]))


@pytest.fixture(scope="session")
def stacks(figures: Figures) -> Iterator[Stacks]:
    """A check that uses it may change which stack is up."""
    stacks = Stacks(figures)
    yield stacks
    stacks.end()


@pytest.fixture
def cpu(stacks: Stacks) -> Stack:
    """The result of `docker compose up` without any preparation."""
    return stacks.need("cpu", Setup())
