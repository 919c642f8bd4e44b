"""`python -m paged_kernels.resources`: the table of registers, spills and shared memory."""

import itertools
import json
import sys
from collections.abc import Iterator
from dataclasses import asdict
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.progress import track
from rich.table import Table

from paged_kernels.backend import AttentionRule, CacheShape
from paged_kernels.resources.compiled import GPUS, resources
from paged_kernels.resources.forms import (
    attention_launches,
    decoder_launches,
    other_launches,
    product_launches,
    rotation_launches,
)
from paged_kernels.resources.launches import Launch

_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
_RULES = {"causal": AttentionRule(0.1), "window, soft cap": AttentionRule(0.1, 512, 30.0)}
_SHAPES = [(64, 4), (96, 4), (128, 1), (128, 8), (256, 4), (576, 128)]
"""Head sizes, with query heads of a kv head."""
_CACHES = {"": None, ", int8 cache": torch.int8, ", fp8 cache": torch.float8_e4m3fn}
_ROW_WIDTH = 8192
_SIZES = {"ROWS": "rows", "BLOCK": "tiles"}
"""Constants of kernels that are compiled in several sizes."""
_WIDTH = 132


def main(
    gpu: Annotated[list[str] | None, typer.Option(help="Only for this GPU; repeatable: sm_80, sm_90, gfx942.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object per line and kernel.")] = False,
) -> None:
    """Compile every Triton kernel for sm_80, sm_90 and gfx942, without a GPU, and show what it takes of one.

    Exit status 1 if a kernel spills registers to memory or does not fit into the shared memory.
    """
    chosen = gpu or list(GPUS)
    if unknown := sorted({*chosen} - {*GPUS}):
        raise typer.BadParameter(f"{unknown[0]} is not one of {', '.join(GPUS)}", param_hint="--gpu")
    forms = list(_forms())
    console = Console(stderr=True)
    rows = [
        _row(name, form, launch)
        for form, launch in track(forms, "compiling", console=console, disable=not console.is_terminal)
        for name in chosen
    ]
    if as_json:
        for row in rows:
            typer.echo(json.dumps(row))
    else:
        Console(width=None if sys.stdout.isatty() else _WIDTH).print(_table(rows))
    raise typer.Exit(code=not all(row["fits"] for row in rows))


def _forms() -> Iterator[tuple[str, Launch]]:
    """Every launch, with what tells it from others of its kernel."""
    for dtype_name, dtype in _DTYPES.items():
        for head_dim, group in _SHAPES:
            shape = CacheShape(16, 2, head_dim)
            for (cache_name, cache_dtype), (rule_name, rule) in itertools.product(_CACHES.items(), _RULES.items()):
                for launch in attention_launches(shape, group, dtype, rule, cache_dtype):
                    form = f"{dtype_name}, heads of {head_dim} x {group}{cache_name}, {rule_name}"
                    yield _with_sizes(form, launch), launch
            for launch in decoder_launches(shape, group, dtype, _ROW_WIDTH):
                yield f"{dtype_name}, heads of {head_dim}, rows of {_ROW_WIDTH}", launch
            for cache_name, cache_dtype in _CACHES.items():
                for launch in rotation_launches(shape, group, dtype, cache_dtype) if cache_dtype else ():
                    yield f"{dtype_name}, heads of {head_dim}{cache_name}", launch
        for launch in product_launches(dtype):
            yield _with_sizes(dtype_name, launch), launch
        for launch in other_launches(dtype, 151_936):
            yield dtype_name, launch


def _with_sizes(form: str, launch: Launch) -> str:
    sizes = [f", {launch.arguments[key]} {word}" for key, word in _SIZES.items() if key in launch.arguments]
    return form + "".join(sizes)


def _row(gpu: str, form: str, launch: Launch) -> dict[str, Any]:
    taken = resources(launch, GPUS[gpu])
    fits = not taken.spilled_bytes and taken.shared_bytes <= GPUS[gpu].shared_bytes
    return {"kernel": launch.name, "form": form, "gpu": gpu, **asdict(taken), "fits": fits}


def _table(rows: list[dict[str, Any]]) -> Table:
    table = Table("kernel", "form", "GPU", "registers", "spilled bytes", "shared bytes", title="Triton kernels")
    for row in rows:
        style = None if row["fits"] else "bold red"
        table.add_row(*(f"{row[key]}" for key in list(row)[:-1]), style=style)
    return table


if __name__ == "__main__":
    typer.run(main)
