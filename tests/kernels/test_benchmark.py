"""The GPU benchmark where nothing runs; all of it runs in the interpreter (`triton/test_benchmark.py`)."""

import torch
import typer
from typer.testing import CliRunner

from benchmarks.gpu import __main__ as gpu


def test_what_has_no_time_is_named():
    """After the budget nothing new begins, and each thing left out is said."""
    app = typer.Typer()
    app.command()(gpu.main)
    done = CliRunner().invoke(app, ["--interpret", "--part", "kernels", "--budget-s", "1e-9"])
    assert done.exit_code != 0, "a budget is at least a second"
    bench = gpu.Bench(torch.device("cpu"), 0.0, tiny=True)
    gpu._measure(bench, ["kernels"])
    assert bench.figures == []
    assert len(bench.skipped) == 11
    assert all("out of time" in line for line in bench.skipped)
