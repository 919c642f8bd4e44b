"""`python -m benchmarks.gpu_launches`: how many launches a decode step is."""

import json
import subprocess
import sys
from collections.abc import Callable

import pytest

from tests.support.tree import ROOT


@pytest.mark.soak
@pytest.mark.timeout(900)
def test_a_decode_step_is_one_recording_and_few_launches(record_property: Callable[[str, object], None]) -> None:
    """The layers of an 8 B model: at most 330 launches, of which all but a few are one."""
    command = [sys.executable, "-m", "benchmarks.gpu_launches", "--json"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=880, check=False)
    assert done.returncode == 0, done.stderr
    found = {step["shape"]: step for step in json.loads(done.stdout)["steps"]}
    large = found["8B"]
    assert large["launches"] <= 330
    assert large["recorded"] > 9 * large["layers"]
    assert large["outside"] <= 12
    assert large["by_modules"] > 3 * large["launches"]
    record_property(
        "size", f"launches of a decode step: {large['launches']} of 32 layers, {large['by_modules']} by modules"
    )
