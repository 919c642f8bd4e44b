"""Everything that needs a GPU, in one call: kernels, whole steps, the three services, `make test-cuda` and peers.

    python -m benchmarks.gpu                          # a table of goals and one of figures; under 8 minutes
    python -m benchmarks.gpu --part kernels --json    # one JSON object, nothing else; --part may be repeated
    python -m benchmarks.gpu --save                   # writes benchmarks/results/gpu.json behind each part

Needs torch, triton, transformers and grpcio, and a CUDA device; no network and no checkpoint. What else services and tests import
is taken from .gpu-wheels where the machine has it not (benchmarks.gpu.wheels). In a checkout that is not installed:
PYTHONPATH=.:kernels. This module holds the command line and its tables.
"""

import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table

from benchmarks import report
from benchmarks.gpu.device import ENVIRONMENT
from benchmarks.gpu.session import Session
from benchmarks.gpu.stages import STAGES

_NAMES = [stage.name for stage in STAGES]


def main(
    part: Annotated[
        list[str] | None,
        typer.Option(help=f"One of {', '.join(_NAMES)}; may be repeated. Default: all, in this order."),
    ] = None,
    budget_s: Annotated[
        float, typer.Option(min=1, help="Seconds after which all ends; what is less important is left out.")
    ] = 470,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object on standard output, nothing else.")] = False,
    save: Annotated[bool, typer.Option("--save", help="Write benchmarks/results/gpu.json, behind each part.")] = False,
    out: Annotated[Path | None, typer.Option(help="The same to this file.")] = None,
    rehearse: Annotated[
        bool,
        typer.Option(
            "--rehearse", help="Small shapes on a simulated device: shows that all of it runs, without a GPU."
        ),
    ] = False,
) -> None:
    """Measures a GPU's ceilings, kernels, steps and services as shares of them, and runs the tests that need one."""
    if unknown := {*(part or ())} - {*_NAMES}:
        raise typer.BadParameter(f"{min(unknown)} is not a part; parts: {', '.join(_NAMES)}")
    _check_device(rehearse=rehearse)

    def write(result: Mapping[str, Any]) -> None:
        if save or out:
            report.save("gpu", result, out)

    session = Session(
        stages=[stage for stage in STAGES if stage.name in (part or _NAMES)],
        budget_s=budget_s,
        save=write,
        say=lambda line: print(line, file=sys.stderr, flush=True),
        environ={**os.environ, **(ENVIRONMENT if rehearse else {"QUIRE_TEST_DEVICE": "cuda"})},
        rehearse=rehearse,
    )
    result = session.run()
    if as_json:
        print(json.dumps({**report.provenance(), **result}, indent=2))
    else:
        show(result, Console(width=None if sys.stdout.isatty() else 160))
    if any("failed" in stage["outcome"] for stage in result["stages"]):
        raise typer.Exit(1)


def _check_device(*, rehearse: bool) -> None:
    if rehearse:
        return
    if not torch.cuda.is_available():
        typer.echo("benchmarks.gpu: torch finds no CUDA device; --rehearse runs all of it without one", err=True)
        raise typer.Exit(2)
    if "TRITON_INTERPRET" in os.environ:
        raise typer.BadParameter("TRITON_INTERPRET is set: the kernels would not run on the device")


def show(result: Mapping[str, Any], console: Console) -> None:
    """Print the results as tables."""
    table = Table("part", "outcome", "s", title=result.get("device", ""), title_justify="left")
    for stage in result["stages"]:
        table.add_row(stage["name"], stage["outcome"], f"{stage['seconds']:.0f}")
    console.print(table)
    console.print(_goals(result["goals"]))
    console.print(_figures(result))
    for line in result["skipped"]:
        console.print(f"skipped: {line}", markup=False)


def _goals(rows: list[Mapping[str, Any]]) -> Table:
    table = Table("goal", "what", "value", "wanted", "")
    for row in rows:
        value = "not measured" if row["value"] is None else f"{row['value']:,.3g}"
        outcome = "" if row["met"] is None else "met" if row["met"] else "missed"
        table.add_row(row["id"], row["what"], value, f"{'<=' if row['at_most'] else '>='} {row['goal']:g}", outcome)
    return table


def _figures(result: Mapping[str, Any]) -> Table:
    table = Table("part", "what", "shape", "us", "rate", "share of", "", "published elsewhere")
    for stage in result["stages"]:
        for name, row in stage.get("ceilings", {}).items():
            table.add_row(
                stage["name"], name, "first, last", "", f"{row['first']:,}, {row['last']:,} {row['unit']}", "", "", ""
            )
    for row in result["figures"]:
        rate = f"{row['rate']:,.2f} {row['unit']}" if row["unit"] else ""
        cells = (
            row["stage"],
            row["name"],
            row["shape"],
            f"{row['us']:,.1f}",
            rate,
            row["ceiling"],
            f"{row['share']:.0%}",
        )
        table.add_row(*cells, row["anchor"])
    return table


if __name__ == "__main__":
    typer.run(main)
