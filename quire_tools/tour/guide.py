"""Runs stops one after the other; prints each screen and its verdict, and keeps them for the page."""

import textwrap
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console, RenderableType
from rich.rule import Rule
from rich.text import Text

from quire_tools.tour.screen import Screen, Stop
from quire_tools.tour.stage import RunningStack, Stage

_TROUBLE_WIDTH = 400


@dataclass(frozen=True, slots=True)
class CompletedStop:
    """A completed stop. `screen`: None if it raised. `trouble`: what failed; empty = passed."""

    stop: Stop
    screen: Screen | None
    trouble: str

    @property
    def passed(self) -> bool:
        """True if the stop passed."""
        return not self.trouble

    @property
    def verdict(self) -> str:
        """The verdict as one line."""
        trouble = textwrap.shorten(self.trouble, _TROUBLE_WIDTH, placeholder=" ...")
        return f"tour {self.stop.name}: " + ("PASS" if self.passed else f"FAIL {trouble}")

    def picture(self) -> RenderableType:
        """What is printed above the verdict."""
        if self.screen is not None:
            return self.screen.picture()
        return Rule(self.stop.summary, align="left", style="red")


@dataclass(frozen=True, slots=True)
class Guide:
    """Runs stops. See Stage for `running`, `steps_folder` and `progress`."""

    console: Console
    running: RunningStack | None = None
    steps_folder: Path | None = None
    progress: Callable[[str], AbstractContextManager[object]] = lambda text: nullcontext()

    def lead(self, stops: Iterable[Stop]) -> list[CompletedStop]:
        """Run all stops, continuing after failures."""
        return [self._visit(stop) for stop in stops]

    def _visit(self, stop: Stop) -> CompletedStop:
        stage = Stage(stop.name, running=self.running, steps_folder=self.steps_folder, progress=self.progress)
        visit = _visited(stop, stage)
        self.console.print(visit.picture())
        self.console.print(Text(visit.verdict, style="bold green" if visit.passed else "bold red"), soft_wrap=True)
        return visit


def _visited(stop: Stop, stage: Stage) -> CompletedStop:
    try:
        screen = stop.show(stage)
    except Exception as error:  # any error is the verdict of this stop only; the others continue
        return CompletedStop(stop, None, f"{type(error).__name__}: {error}")
    return CompletedStop(stop, screen, screen.trouble)
