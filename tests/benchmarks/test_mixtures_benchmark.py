"""`python -m benchmarks.mixtures`: fused decoder and modules are measured in one run."""

import json
import os
import subprocess
import sys

import pytest

from quire.local_stack.processes import child_environment


@pytest.mark.long
@pytest.mark.timeout(300)
def test_both_ways_are_measured() -> None:
    """One JSON object with tokens per second of each, by number of streams."""
    sizes = ("--model", "bench-moe-20m", "--streams", "1,4", "--output", "4", "--rounds", "1")
    command = [sys.executable, "-m", "benchmarks.mixtures", "--json", *sizes]
    done = subprocess.run(
        command, env=child_environment(os.environ), capture_output=True, text=True, check=True, timeout=280
    )
    speeds = json.loads(done.stdout)["tokens_per_s"]
    assert list(speeds) == ["1", "4"]
    assert all(set(by_way) == {"fused", "modules"} and min(by_way.values()) > 0 for by_way in speeds.values())
