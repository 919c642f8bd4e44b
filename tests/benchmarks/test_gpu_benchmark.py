"""`python -m benchmarks.gpu` where there is no GPU, and what it may import (without the network, without services)."""

import os

import pytest
import torch
import typer
from typer.testing import CliRunner

from benchmarks.gpu import __main__ as gpu
from tests.support.tree import run_python

IMPORTED = """
import sys
import benchmarks.gpu.__main__
print(sorted({"grpc", "opentelemetry", "paged_kernels"} & sys.modules.keys()))
"""


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "benchmarks.gpu: torch finds no CUDA device; there is nothing to measure"),
        (["--part", "nothing"], "is not a part; parts: kernels, steps"),
        (["--interpret"], "needs TRITON_INTERPRET=1"),
    ],
)
def test_without_a_device_it_says_so(arguments: list[str], message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One line and status 2, nothing on standard output; arguments are checked before."""
    monkeypatch.setenv("COLUMNS", "200")
    app = typer.Typer(rich_markup_mode=None)
    app.command()(gpu.main)
    done = CliRunner().invoke(app, arguments)
    assert (done.exit_code, done.stdout) == (2, "")
    assert message in done.stderr


@pytest.mark.long
def test_it_needs_no_services() -> None:
    """Neither gRPC nor OpenTelemetry is imported."""
    env = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"} | {"PYTHONPATH": "kernels"}
    done = run_python(IMPORTED, env=env)
    assert done.stdout == "['paged_kernels']\n", done.stdout + done.stderr
