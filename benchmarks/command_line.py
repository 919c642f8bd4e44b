"""Shared command-line helpers of in-process benchmarks: lists of numbers, and progress on a terminal."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn


def numbers(text: str, low: int, high: int, example: str) -> list[int]:
    """Parse "N" or "N,N,..." into distinct numbers, in order. Usage error if one is not within `low` to `high`."""
    try:
        found = [int(part) for part in text.split(",")]
    except ValueError:
        found = []
    if not found or min(found) < low or max(found) > high:
        raise typer.BadParameter(f"{text!r} is not a list of numbers from {low} to {high}, such as {example}")
    return list(dict.fromkeys(found))


@contextmanager
def progress(name: str, total: int) -> Iterator[Callable[[], None]]:
    """Yield a function to call after each of `total` parts. Drawn on standard error if that is a terminal."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), disable=not sys.stderr.isatty()) as bar:
        task = bar.add_task(name, total=total)
        yield lambda: bar.advance(task)
