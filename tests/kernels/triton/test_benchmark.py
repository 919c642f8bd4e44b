"""The GPU benchmark at tiny shapes in the interpreter: all of it runs, and says what it did."""

import json
import time

import pytest
import typer
from typer.testing import CliRunner

from benchmarks.gpu import __main__ as gpu
from benchmarks.gpu.kernels import Kernels, installed_libraries
from tests.kernels.triton.cases import DEVICE

pytestmark = pytest.mark.skipif(DEVICE.type != "cpu", reason="the interpreter is not there")


@pytest.mark.long
def test_every_part_runs():
    """Ceilings before and after, each kernel, decode steps; as JSON."""
    app = typer.Typer()
    app.command()(gpu.main)
    done = CliRunner().invoke(app, ["--interpret", "--json"])
    assert done.exit_code == 0, done.output
    result = json.loads(done.stdout)
    assert set(result["ceilings"]) == {"memory", "gemm", "to host", "to device"}
    assert all(row["first"] >= 0 and row["last"] >= 0 for row in result["ceilings"].values())
    names = {row["name"] for row in result["figures"]}
    assert names == {
        "decode attention", "plan of a step", "prefill attention", "cache write", "block copy", "swap out", "swap in",
        "sampling, greedy", "sampling, temperature", "sampling, top-k and top-p", "decode step, modules",
        "decode step, program", "decode step, recorded",
    }  # fmt: skip
    assert all(row["us"] > 0 and 0 <= row["share"] < 1 for row in result["figures"])
    assert result["skipped"] == []


@pytest.mark.long
def test_libraries_have_rows(attention_packages, monkeypatch):
    """Beside Triton's: where they take the shape, and the step."""
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    bench = gpu.Bench(DEVICE, time.monotonic() + 300, tiny=True)
    bench.measure_ceilings()
    Kernels(bench, installed_libraries(bench.skipped)).run()
    rows = [figure.name for figure in bench.figures if "attention" in figure.name]
    assert rows == [
        *["decode attention", "decode attention, flash-attn-3"] * 2,
        *("prefill attention", "prefill attention, flash-attn-3", "prefill attention, torch"),
    ]
    assert bench.skipped == ["flashinfer takes head sizes of 64, 128 or 256, not 32"]
