"""The console that screens are printed on: fixed width, no markup."""

from typing import IO

from rich.console import Console

from quire_tools.tour.screen import WIDTH


def screen_console(file: IO[str] | None = None, *, record: bool = False, force_terminal: bool | None = None) -> Console:
    """A console for `file` (None = standard output), WIDTH columns wide, or as wide as a narrower terminal."""
    console = Console(
        file=file, record=record, force_terminal=force_terminal, markup=False, highlight=False, emoji=False
    )
    console.width = min(console.width, WIDTH) if file is None and console.is_terminal else WIDTH
    return console
