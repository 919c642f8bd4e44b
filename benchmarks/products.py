"""Measures products with packed weights: bytes of weights and FLOPs per second, by number of rows and storage form.

    python -m benchmarks.products                                # a table for each shape
    python -m benchmarks.products --shapes 576x960 --rows 1,8    # columns behind the depth
    python -m benchmarks.products --json                         # one JSON object, nothing else

Each call goes through more copies of the weights than caches hold, as a model's step goes through its layers:
packed ones as one program, `F.linear` by one call each. In turn, the best of several rounds; the same run
also measures plain memory reads.
"""

import json
import os
import re
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Annotated, Any

import numpy as np
import torch
import typer
from rich.console import Console
from rich.table import Table
from torch.nn import functional

from benchmarks import command_line, report
from paged_kernels.backend import PADDING_SLOT, AttentionBatch, CacheShape
from paged_kernels.decoder import DecoderKernels
from paged_kernels.program import Linear, PackedWeights, Program, Rows
from paged_kernels.quantized import quantized
from paged_kernels.registry import decoder_kernels, make_backend

_MIB = 2**20
_SHAPE = re.compile(r"(\d+)x(\d+)")
_CACHE = CacheShape(16, 1, 2)
_LEAST_S = 0.02
_GROUP = 32
_READ = "memory read"
FORMS: Mapping[str, tuple[torch.dtype, int]] = {
    "bf16": (torch.bfloat16, 0),
    "int8": (torch.bfloat16, 8),
    "int4": (torch.bfloat16, 4),
    "float32": (torch.float32, 0),
}
"""Dtype of the rows, and bits of quantized weights in groups of 32, or 0."""
TORCH = {"F.linear bf16": torch.bfloat16, "F.linear float32": torch.float32}

Call = Callable[[], object]


def shapes_of(text: str) -> list[tuple[int, int]]:
    """(depth, columns) of "DEPTHxCOLUMNS,..."; usage error for other texts."""
    found = [_SHAPE.fullmatch(part.strip()) for part in text.split(",")]
    shapes = [(int(match[1]), int(match[2])) for match in found if match]
    if len(shapes) < len(found) or any(depth % 4 or not depth or not columns for depth, columns in shapes):
        raise typer.BadParameter(
            f"{text!r} is not a list of DEPTHxCOLUMNS, such as 576x960,1536x576; depths are multiples of 4"
        )
    return shapes


def _batch(num_rows: int) -> AttentionBatch:
    """Rows that belong to no sequence, which products ignore."""
    zeros, tables = torch.zeros(num_rows, dtype=torch.int32), torch.zeros(1, 1, dtype=torch.int32)
    slots = torch.full((num_rows,), PADDING_SLOT, dtype=torch.int64)
    return AttentionBatch(zeros, zeros, slots, tables, np.array([0, 0], np.int32))


class Weights:
    """Weights of one shape in every form, with enough copies of each."""

    def __init__(self, kernels: DecoderKernels, depth: int, columns: int, cold_bytes: int) -> None:
        self.depth, self.columns, self._kernels = depth, columns, kernels
        self._packed = {form: self._copies(*FORMS[form], cold_bytes) for form in FORMS}
        self._plain = {
            dtype: [self._random(columns, dtype) for _ in range(_count(cold_bytes, columns * depth * dtype.itemsize))]
            for dtype in TORCH.values()
        }

    def calls(self, num_rows: int) -> dict[str, tuple[Call, int, int]]:
        """By name: a call that multiplies `num_rows` rows with all copies, bytes of weights, number of copies."""
        found: dict[str, tuple[Call, int, int]] = {}
        for form, packed in self._packed.items():
            num_bytes = sum(each.num_bytes for each in packed)
            found[form] = (self._program(packed, FORMS[form][0], num_rows), num_bytes, len(packed))
        for name, dtype in TORCH.items():
            plain, rows = self._plain[dtype], self._random(num_rows, dtype)
            found[name] = (partial(_each_linear, rows, plain), sum(each.nbytes for each in plain), len(plain))
        return found

    def _copies(self, dtype: torch.dtype, bits: int, cold_bytes: int) -> list[PackedWeights]:
        plain = self._random(self.columns, dtype)
        weight = quantized(plain, bits, _GROUP) if bits else plain
        first = self._kernels.pack(weight, None)
        more = range(_count(cold_bytes, first.num_bytes) - 1)
        return [first, *(self._kernels.pack(weight, None) for _ in more)]

    def _program(self, packed: Sequence[PackedWeights], dtype: torch.dtype, num_rows: int) -> Call:
        widths = {rows: 2 for rows in Rows} | {Rows.STREAM: self.depth, Rows.GATED: self.columns}
        operators = [Linear(Rows.STREAM, Rows.GATED, each) for each in packed]
        prepared = self._kernels.prepare(Program(operators, widths, 1, _CACHE, dtype), dtype)
        pool = torch.zeros(1, 2, 1, _CACHE.block_elements(dtype), dtype=dtype)
        return partial(prepared.run, self._random(num_rows, dtype), [_batch(num_rows)], pool)

    def _random(self, count: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.randn(count, self.depth, generator=torch.Generator().manual_seed(1)).to(dtype)


def _count(cold_bytes: int, num_bytes: int) -> int:
    return max(1, -(-cold_bytes // num_bytes))


def _each_linear(rows: torch.Tensor, weights: Sequence[torch.Tensor]) -> None:
    for each in weights:
        functional.linear(rows, each)


def fastest_s(calls: Mapping[str, Call], rounds: int) -> dict[str, float]:
    """Seconds of the fastest call of each, all called in turn."""
    times: dict[str, float] = {}
    for turn in range(rounds + 1):
        for name, call in calls.items():
            began, num_calls = time.perf_counter(), 0
            while num_calls == 0 or time.perf_counter() - began < _LEAST_S:
                call()
                num_calls += 1
            spent = (time.perf_counter() - began) / num_calls
            if turn:  # the first round touches memory
                times[name] = min(spent, times.get(name, spent))
    return times


def measure(weights: Weights, num_rows: int, rounds: int) -> list[dict[str, Any]]:
    """All forms of a shape with `num_rows` rows, and a plain read of as much memory."""
    made = weights.calls(num_rows)
    numbers = torch.ones(max(num_bytes for _, num_bytes, _ in made.values()) // 4)
    calls = {name: call for name, (call, _, _) in made.items()}
    times = fastest_s(calls | {_READ: numbers.sum}, rounds)
    same = {"depth": weights.depth, "columns": weights.columns, "rows": num_rows}
    rows: list[dict[str, Any]] = []
    for name, (_, num_bytes, copies) in made.items():
        each_s = times[name] / copies
        flops = 2 * num_rows * weights.depth * weights.columns
        figures = {"us": each_s * 1e6, "gb_s": num_bytes / times[name] / 1e9, "gflop_s": flops / each_s / 1e9}
        rows.append({**same, "form": name, **figures})
    return [*rows, {**same, "form": _READ, "us": None, "gb_s": numbers.nbytes / times[_READ] / 1e9, "gflop_s": None}]


def _table(rows: Sequence[Mapping[str, Any]], depth: int, columns: int) -> Table:
    """A table with a line per form and three figures per number of rows."""
    counts = sorted({row["rows"] for row in rows})
    table = Table(title=f"{depth} x {columns}: GB/s of weights, GFLOP/s, microseconds", title_justify="left")
    table.add_column("form")
    for count in counts:
        table.add_column(f"{count} rows" if count > 1 else "1 row", justify="right")
    for form in dict.fromkeys(row["form"] for row in rows):
        table.add_row(
            form, *(_cell(row) for count in counts for row in rows if (row["form"], row["rows"]) == (form, count))
        )
    return table


def _cell(row: Mapping[str, Any]) -> str:
    if row["us"] is None:
        return f"{row['gb_s']:.1f} GB/s"
    return f"{row['gb_s']:.1f}, {row['gflop_s']:.0f}, {row['us']:.0f}"


app = typer.Typer(rich_markup_mode="rich", add_completion=False)


@app.command()
def main(
    shapes: Annotated[str, typer.Option(help="DEPTHxCOLUMNS, comma-separated. Default: those of bench-135m.")] = (
        "576x960,576x3072,1536x576,576x49152"
    ),
    rows: Annotated[str, typer.Option(help="Rows multiplied at a time, N or N,N,...")] = "1,2,4,8,16,64,256",
    threads: Annotated[int, typer.Option(min=0, help="Compute threads; 0 = torch's default.")] = 0,
    cold: Annotated[int, typer.Option(min=1, help="MiB of weights of each form; should exceed the caches.")] = 128,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds; the best of each form counts.")] = 5,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object and nothing else.")] = False,
    save: Annotated[bool, typer.Option("--save", help="Write benchmarks/results/products.json.")] = False,
) -> None:
    """Measures products with packed weights (bf16, float32, int8, int4), F.linear and plain memory reads."""
    counts, wanted = command_line.numbers(rows, 1, 65_536, "1,8,64"), shapes_of(shapes)
    kernels = decoder_kernels(make_backend("cpu", os.environ, lambda line: print(line, file=sys.stderr)))
    if kernels is None:
        raise typer.BadParameter("compiled CPU kernels are not available; the warning above has the reason")
    if threads:
        torch.set_num_threads(threads)
    found: list[dict[str, Any]] = []
    with command_line.progress("products", len(wanted) * len(counts)) as tick:
        for depth, columns in wanted:
            weights = Weights(kernels, depth, columns, cold * _MIB)
            for count in counts:
                found += measure(weights, count, rounds)
                tick()
    content = {"benchmark": "products", "threads": torch.get_num_threads(), "runs": found}
    if save:
        report.save("products", content)
    if as_json:
        typer.echo(json.dumps(content))
        return
    for depth, columns in wanted:
        Console().print(_table([r for r in found if (r["depth"], r["columns"]) == (depth, columns)], depth, columns))


if __name__ == "__main__":
    app()
