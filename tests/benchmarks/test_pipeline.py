"""`python -m benchmarks.pipeline`: one process and two stages are measured in one run."""

import json
import os
import subprocess
import sys

import pytest

from quire.local_stack.processes import child_environment


@pytest.mark.long
@pytest.mark.timeout(300)
def test_all_ways_are_measured() -> None:
    """One JSON object with tokens per second of each."""
    sizes = ("--model", "bench-15m", "--requests", "4", "--prompt", "4", "--output", "4", "--rounds", "1")
    command = [sys.executable, "-m", "benchmarks.pipeline", "--json", *sizes]
    done = subprocess.run(
        command, env=child_environment(os.environ), capture_output=True, text=True, check=True, timeout=280
    )
    speeds = json.loads(done.stdout)["tokens_per_s"]
    assert len(speeds) == 3 and all(speed["p50"] > 0 for speed in speeds.values())
