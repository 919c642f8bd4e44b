"""What `quire up` shows on standard error: the model's load, the services' log lines, and restarts."""

import sys
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from svc_common.observability.log_format import JsonFormatter, LogFormat

_ERROR = "error: "
_LEVELS = ("WARNING", "ERROR", "CRITICAL")
_LINKS = ("gateway_svc.engine.scheduler_link", "scheduler_svc.workers.link")
"""They warn that services cannot reach each other, which is as it should be until all have started, and when they stop."""
_LANES = ("scheduler_svc.workers.lane",)
"""They warn that a worker is lost, which is as it should be when it stops."""


class LoadProgress:
    """The progress of a load: a bar on a terminal, elsewhere one line per stage; with JSON logs, JSON lines. Context manager.

    `quiet`: of the services' lines, warnings and errors only.
    """

    def __init__(self, form: LogFormat, *, quiet: bool = False) -> None:
        console = Console(stderr=True)
        self._form = form
        self._quiet = quiet
        self._is_terminal = console.is_terminal and form is LogFormat.TEXT
        self._bar = Progress(
            TextColumn("[bold]model[/bold]"),
            BarColumn(),
            TextColumn("{task.description}"),
            TimeElapsedColumn(),
            console=console,
            transient=True,
        )
        self._task = self._bar.add_task("starting the services", total=1.0)
        self._stage = ""  # up to its colon
        self._expected: tuple[str, ...] = _LINKS  # loggers of which warnings are left out

    def __enter__(self) -> Self:
        if self._is_terminal:
            self._bar.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.finish()

    def line(self, service: str, line: str) -> None:
        """Show a line that a service wrote, above the bar where there is one.

        Left out: its error, which comes as the command's own, and while the services start or stop, that one cannot reach another.
        """
        is_expected = "WARNING" in line and any(logger in line for logger in self._expected)
        is_left_out = self._quiet and not any(level in line for level in _LEVELS)
        if line.startswith(_ERROR) or is_expected or is_left_out:
            return
        self._write(service, f"{service}: {line}", line)

    def restart(self, death: str, pause_s: float) -> None:
        """Show that a service died."""
        text = f"{death}; starting it again in {pause_s:.1f} s"
        self._write("up", text, text)

    def _write(self, service: str, text: str, line: str) -> None:
        """`line` as JSON if it is not; services that write JSON include their name."""
        if self._form is LogFormat.JSON:
            text = line if line.startswith("{") else JsonFormatter(service).line("quire.up", line)
        sys.stderr.write(f"{text}\n")
        sys.stderr.flush()

    def show(self, stage: str, fraction: float) -> None:
        """Show the progress of the load, 0..1. What follows a colon in `stage` changes within the stage."""
        self._bar.update(self._task, completed=fraction, description=stage)
        if (kind := stage.partition(":")[0]) != self._stage and not self._is_terminal:
            line = f"loading: {stage}"
            self._write("worker", f"worker: {line}", line)
        self._stage = kind

    def finish(self) -> None:
        """Remove the bar, when the services are up or have failed. Idempotent."""
        self._expected = ()
        if self._is_terminal:
            self._bar.stop()

    def stopping(self) -> None:
        """Note that the services are being stopped."""
        self._expected = (*_LINKS, *_LANES)
