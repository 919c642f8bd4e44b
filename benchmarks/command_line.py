"""What the benchmarks that run in this process share on their command lines: lists of numbers, and progress on a terminal."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn


def numbers(text: str, low: int, high: int, example: str) -> list[int]:
    """The numbers of "N" or "N,N,...", each once, in the order given. A usage error where one is not within `low` to `high`."""
    try:
        found = [int(part) for part in text.split(",")]
    except ValueError:
        found = []
    if not found or min(found) < low or max(found) > high:
        raise typer.BadParameter(f"{text!r} is no list of numbers from {low} to {high}, such as {example}")
    return list(dict.fromkeys(found))


@contextmanager
def progress(name: str, total: int) -> Iterator[Callable[[], None]]:
    """Call what it gives after each of `total` parts. Drawn on standard error where that is a terminal."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), disable=not sys.stderr.isatty()) as bar:
        task = bar.add_task(name, total=total)
        yield lambda: bar.advance(task)
