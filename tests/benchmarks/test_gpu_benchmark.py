"""`python -m benchmarks.gpu` where there is no GPU: what it says, and that all of its parts run on the simulated device."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable

import pytest
import torch
import typer
from typer.testing import CliRunner

from benchmarks.gpu import __main__ as gpu
from benchmarks.gpu import goals
from benchmarks.gpu.stages import STAGES
from tests.support.tree import ROOT

_ALL_S = 1800.0


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "benchmarks.gpu: torch finds no CUDA device; --rehearse runs all of it without one"),
        (["--part", "nothing"], "nothing is not a part; parts: stack, kernels, steps-8B"),
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


class Asked(dict):
    """Figures that note the names of those that are asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __contains__(self, key: object) -> bool:
        assert isinstance(key, tuple)
        self.names.add(key[0])
        return False


@pytest.mark.long
def test_all_parts_run_on_the_simulated_device(record_property: Callable[[str, object], None]) -> None:
    """R18: one call, every part done; each goal is read from figures that a part makes. It has more time here than on a GPU."""
    begin_s = time.monotonic()
    env = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "benchmarks.gpu", "--rehearse", "--json", "--budget-s", str(_ALL_S)]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=_ALL_S + 60, check=False)
    found, seconds = json.loads(done.stdout), time.monotonic() - begin_s
    outcomes = {stage["name"]: stage["outcome"] for stage in found["stages"]}
    assert done.returncode == 0, outcomes
    assert list(outcomes) == [stage.name for stage in STAGES]
    assert all(outcome.startswith("done") for outcome in outcomes.values()), outcomes
    asked = Asked()
    for goal in goals.GOALS:
        goal.read(asked)
    assert {name for name in asked.names if "FA3" not in name} <= {row["name"] for row in found["figures"]}
    record_property("size", f"benchmarks.gpu rehearsed: {len(found['figures'])} figures in {seconds:.0f} s")
