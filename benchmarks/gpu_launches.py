"""`python -m benchmarks.gpu_launches`: how many kernels a decode step launches on a GPU, counted without one."""

import json
import os
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from benchmarks import report


def main(
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object on standard output, nothing else.")] = False,
) -> None:
    """Count the launches of a decode step of one greedy row, for models with the layers of Llama 8B and Qwen3 0.6B.

    The models are narrow and run on a device that checks what a CUDA graph allows. It takes about three minutes.
    """
    # Triton reads it when it is imported.
    os.environ["TRITON_INTERPRET"] = "1"
    from benchmarks.gpu import launches  # noqa: PLC0415

    counts = [launches.count(shape) for shape in launches.SHAPES]
    if as_json:
        print(json.dumps({**report.provenance(), "steps": counts}, indent=2))
        return
    table = Table("shape", "layers", "launches", "of them in one graph", "module by module")
    for found in counts:
        table.add_row(*(str(found[name]) for name in ("shape", "layers", "launches", "recorded", "by_modules")))
    Console().print(table)


if __name__ == "__main__":
    typer.run(main)
