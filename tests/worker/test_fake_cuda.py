"""The whole engine on a CUDA device that is none (`fake_cuda/`), in a process of its own."""

import os
import re
import subprocess
import sys
from collections.abc import Callable

import pytest

from tests.support.tree import ROOT


def run_on_fake_cuda(paths: list[str], marker: str, timeout_s: float) -> str:
    """Output of the tests with that marker expression; all must pass."""
    env = {**os.environ, "QUIRE_TEST_DEVICE": "fake-cuda", "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "pytest", *paths, "-m", marker, "-p", "no:cacheprovider"]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=timeout_s, check=False)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    return done.stdout


def report(output: str, least_passed: int, record: Callable[[str, object], None]) -> None:
    """Passes on how much was tested."""
    passed = re.search(r"(\d+) passed", output)
    assert passed is not None
    assert int(passed[1]) >= least_passed, output[-2000:]
    for line in re.findall(r"^((?:fake CUDA:|triton) .*)$", output, re.MULTILINE):
        record("size", line)


@pytest.mark.timeout(900)
def test_start_to_finish_on_a_fake_cuda_device(record_property: Callable[[str, object], None]) -> None:
    """R8, R9: start, memory profile, cache, steps of every kind, with kernels in plain torch and with Triton's, interpreted.

    R18, R123, R124: each of these equals plain torch over a sample of random shapes.
    """
    # In one process: what it imports takes seconds. `tests/kernels/test_triton.py` has the whole, on tensors of the host.
    kernels = [
        f"tests/kernels/triton/test_{name}.py"
        for name in ("attention", "attention_libraries", "decoder", "moves", "products", "sampling")
    ]
    report(run_on_fake_cuda(["tests/worker/fake_cuda", *kernels], "not long and not soak", 880), 38, record_property)


@pytest.mark.soak
@pytest.mark.timeout(3000)
def test_recorded_steps_of_all_families(record_property: Callable[[str, object], None]) -> None:
    """R18: one after the other."""
    report(run_on_fake_cuda(["tests/worker/fake_cuda"], "soak", 2900), 7, record_property)


@pytest.mark.long
@pytest.mark.timeout(3000)
def test_random_lives_on_a_fake_cuda_device(record_property: Callable[[str, object], None]) -> None:
    """R148, R157, R158: several random lives."""
    report(run_on_fake_cuda(["tests/worker/fake_cuda"], "long", 2900), 1, record_property)


@pytest.mark.soak
@pytest.mark.timeout(3000)
def test_the_engines_tests_on_a_fake_cuda_device(record_property: Callable[[str, object], None]) -> None:
    """Some of what `make test-cuda` runs, with kernels in plain torch."""
    names = ("cache", "steps", "pooling", "generation_options")
    paths = [*(f"tests/worker/engine/test_{name}.py" for name in names), "tests/worker/states/test_state_models.py"]
    report(
        run_on_fake_cuda(paths, "not long and not soak", 2900),
        45,
        record_property,
    )
