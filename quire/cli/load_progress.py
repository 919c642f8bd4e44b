"""What `quire up` shows on standard error while the services start: the model's load, and what the services say."""

import sys
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

_ERROR = "error: "
_WARNING = "WARNING "


class LoadProgress:
    """Owns the progress bar. On a terminal a bar, elsewhere one line per stage. Context manager."""

    def __init__(self) -> None:
        console = Console(stderr=True)
        self._is_terminal = console.is_terminal
        self._bar = Progress(
            TextColumn("[bold]model[/bold]"),
            BarColumn(),
            TextColumn("{task.description}"),
            TimeElapsedColumn(),
            console=console,
            transient=True,
        )
        self._task = self._bar.add_task("starting the services", total=1.0)
        self._stage = ""
        self._is_starting = True

    def __enter__(self) -> Self:
        if self._is_terminal:
            self._bar.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.finish()

    def line(self, service: str, line: str) -> None:
        """A line that a service wrote.

        Its error is not repeated, it comes as the command's own; nor are warnings while the services are waiting for each other.
        """
        if line.startswith(_ERROR) or (self._is_starting and line.startswith(_WARNING)):
            return
        sys.stderr.write(f"{service}: {line}\n")
        sys.stderr.flush()

    def show(self, stage: str, fraction: float) -> None:
        """How far the load is, 0..1."""
        self._bar.update(self._task, completed=fraction, description=stage)
        if stage != self._stage and not self._is_terminal:
            self.line("worker", f"loading: {stage}")
        self._stage = stage

    def finish(self) -> None:
        """The services are up, or will never be: takes the bar away. Idempotent."""
        self._is_starting = False
        if self._is_terminal:
            self._bar.stop()
