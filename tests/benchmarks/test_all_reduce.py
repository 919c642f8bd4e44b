"""`python -m benchmarks.all_reduce`: both ways are measured in one run."""

import json
import os
import subprocess
import sys

from quire.local_stack.processes import child_environment


def test_both_ways_are_measured() -> None:
    """One JSON object with the figures of shared memory and of Gloo."""
    command = [sys.executable, "-m", "benchmarks.all_reduce", "--json", "--rounds", "1", "--sizes", "2x16"]
    done = subprocess.run(
        command, env=child_environment(os.environ), capture_output=True, text=True, check=True, timeout=120
    )
    found = json.loads(done.stdout)
    assert found["ranks"] == 2
    assert all(found["microseconds"][way]["2x16"]["p50"] > 0 for way in ("shared memory", "Gloo"))
