"""The Triton kernels in the interpreter, in a process of their own (see `triton/conftest.py`).

A sample is in `tests/worker/test_fake_cuda.py`.
"""

import os
import re
import subprocess
import sys
from collections.abc import Callable

import pytest

from tests.support.tree import ROOT


def run_interpreted(marker: str, timeout_s: float) -> str:
    """Output of the tests in `tests/kernels/triton` with that marker expression; all must pass."""
    env = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    env.pop("QUIRE_TEST_DEVICE", None)
    command = [sys.executable, "-m", "pytest", "tests/kernels/triton", "-m", marker, "-p", "no:cacheprovider"]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=timeout_s, check=False)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    return done.stdout


def report(output: str, least_passed: int, record: Callable[[str, object], None]) -> None:
    """Passes on how much was tested."""
    passed = re.search(r"(\d+) passed", output)
    assert passed is not None
    assert int(passed[1]) >= least_passed, output[-2000:]
    for line in re.findall(r"^(triton .*)$", output, re.MULTILINE):
        record("size", line)


@pytest.mark.long
@pytest.mark.timeout(3000)
def test_every_shape_in_the_interpreter(record_property: Callable[[str, object], None]) -> None:
    """R18, R123, R124: the same over at least 50 random shapes per kernel, and the whole worker equals its CPU backend."""
    report(run_interpreted("long", 2_900), 8, record_property)
