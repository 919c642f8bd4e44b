"""Measures the Triton kernels and decode steps on a GPU, as shares of the device's own ceilings.

    python -m benchmarks.gpu                          # a table; takes minutes
    python -m benchmarks.gpu --part kernels --json    # one JSON object, nothing else
    python -m benchmarks.gpu --save                   # writes benchmarks/results/gpu.json too

Needs torch, triton, transformers, numpy and protobuf, and a CUDA device; no network, services or checkpoint. In a
checkout that is not installed: PYTHONPATH=.:kernels. This module holds the command line and its table.
"""

import json
import time
from collections.abc import Mapping
from typing import Annotated, Any

import torch
import triton
import typer
from rich.console import Console
from rich.table import Table

from benchmarks import report
from benchmarks.gpu import kernels as gpu_kernels
from benchmarks.gpu import steps as gpu_steps
from benchmarks.gpu.clock import Bench, Figure
from paged_kernels.gpu.backend import is_interpreted

PARTS = ("kernels", "steps")
_UNITS = {"memory": (1e12, "TB/s"), "gemm": (1e12, "TFLOP/s"), "to host": (1e9, "GB/s"), "to device": (1e9, "GB/s")}


def main(
    part: Annotated[list[str] | None, typer.Option(help="kernels or steps; may be repeated. Default: both.")] = None,
    budget_s: Annotated[float, typer.Option(min=1, help="Seconds after which no further measurement starts.")] = 400,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object on standard output, nothing else.")] = False,
    save: Annotated[bool, typer.Option("--save", help="Write benchmarks/results/gpu.json.")] = False,
    interpret: Annotated[
        bool, typer.Option("--interpret", hidden=True, help="Tiny shapes in Triton's interpreter.")
    ] = False,
) -> None:
    """Measures the device's ceilings, then kernels and whole decode steps as shares of them."""
    parts = part or list(PARTS)
    if unknown := set(parts) - set(PARTS):
        raise typer.BadParameter(f"{', '.join(sorted(unknown))} is not a part; parts: {', '.join(PARTS)}")
    bench = Bench(_device(interpret=interpret), time.monotonic() + budget_s, interpret)
    _measure(bench, parts)
    result = as_dict(bench)
    if save:
        report.save("gpu", result)
    if as_json:
        print(json.dumps({**report.provenance(), **result}, indent=2))
    else:
        show(result, Console())


def _device(*, interpret: bool) -> torch.device:
    if interpret:
        if not is_interpreted():
            raise typer.BadParameter("--interpret needs TRITON_INTERPRET=1 in the environment")
        return torch.device("cpu")
    if not torch.cuda.is_available():
        typer.echo("benchmarks.gpu: torch finds no CUDA device; there is nothing to measure", err=True)
        raise typer.Exit(2)
    if is_interpreted():
        raise typer.BadParameter("TRITON_INTERPRET is set: the kernels would not run on the device")
    return torch.device("cuda")


def _measure(bench: Bench, parts: list[str]) -> None:
    bench.measure_ceilings()
    # A step's floor is in seconds: its work is that many seconds, done at a rate of one per second at best.
    bench.ceilings["floor"] = [1.0]
    if "kernels" in parts:
        on_device = bench.device.type == "cuda"  # the libraries have no interpreter
        gpu_kernels.Kernels(bench, gpu_kernels.installed_libraries(bench.skipped) if on_device else ()).run()
    if "steps" in parts:
        gpu_steps.run(bench)
    bench.measure_ceilings()


def as_dict(bench: Bench) -> dict[str, Any]:
    """All results, ready for JSON."""
    on_cuda = bench.device.type == "cuda"
    return {
        "benchmark": "gpu",
        "device": torch.cuda.get_device_name() if on_cuda else "interpreter",
        "triton": triton.__version__,
        "ceilings": {name: _ceiling(name, rates) for name, rates in bench.ceilings.items() if name in _UNITS},
        "figures": [_row(bench, figure) for figure in bench.figures],
        "skipped": bench.skipped,
    }


def _ceiling(name: str, rates: list[float]) -> dict[str, Any]:
    unit, label = _UNITS[name]
    return {"first": round(rates[0] / unit, 3), "last": round(rates[-1] / unit, 3), "unit": label}


def _row(bench: Bench, figure: Figure) -> dict[str, Any]:
    unit, label = _UNITS.get(figure.ceiling, (0.0, ""))
    return {
        "name": figure.name,
        "shape": figure.shape,
        "us": round(figure.seconds * 1e6, 2),
        "rate": round(figure.rate / unit, 4) if unit else None,
        "unit": label,
        "ceiling": figure.ceiling,
        "share": round(bench.share(figure), 4),
        "goal": figure.goal,
        "anchor": figure.anchor,
    }


def show(result: Mapping[str, Any], console: Console) -> None:
    """Print the results as tables."""
    table = Table("ceiling", "first", "last", "", title=result["device"], title_justify="left")
    for name, row in result["ceilings"].items():
        table.add_row(name, f"{row['first']:,}", f"{row['last']:,}", row["unit"])
    console.print(table)
    table = Table("what", "shape", "us", "rate", "share of", "", "goal", "published elsewhere")
    for row in result["figures"]:
        rate = f"{row['rate']:,.2f} {row['unit']}" if row["unit"] else ""
        goal = "" if row["goal"] is None else f"{row['goal']:.0%} {'met' if row['share'] >= row['goal'] else 'missed'}"
        table.add_row(
            row["name"],
            row["shape"],
            f"{row['us']:,.1f}",
            rate,
            row["ceiling"],
            f"{row['share']:.0%}",
            goal,
            row["anchor"],
        )
    console.print(table)
    for line in result["skipped"]:
        console.print(f"skipped: {line}", markup=False)


if __name__ == "__main__":
    typer.run(main)
