"""What a run took: printed as a table, and written to benchmarks/results/compose.json."""

import platform
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks import report
from tests.compose.images import client_version


def save(
    steps: dict[str, float], sizes: dict[str, int], figures: dict[str, Any], versions: dict[str, str], checks: str
) -> Path:
    """The file's path."""
    content = {
        "benchmark": "compose",
        "system": platform.freedesktop_os_release()["PRETTY_NAME"],
        "engine": {"client": client_version(), **versions},
        "checks": checks,
        "steps_s": steps,
        "image_bytes": sizes,
        "figures": figures,
    }
    return report.save("compose", content)


def show(steps: dict[str, float], sizes: dict[str, int], figures: dict[str, Any]) -> None:
    """Three columns of figures on standard output."""
    console = Console(highlight=False)
    _table(console, "steps", "s", {name: f"{seconds:.1f}" for name, seconds in steps.items()})
    _table(console, "images", "MB", {name: f"{size / 1e6:.0f}" for name, size in sizes.items()})
    _table(console, "measured", "", {name: str(value) for name, value in figures.items()})


def _table(console: Console, title: str, unit: str, rows: dict[str, str]) -> None:
    table = Table(title, unit, box=None, pad_edge=False)
    table.columns[1].justify = "right"
    for name, value in rows.items():
        table.add_row(name, value)
    console.print(table, "")
