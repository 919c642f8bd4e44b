"""`python -m quire.demo`: what `make demo` runs, also from a working directory with spaces."""

import os
import re
import subprocess
import sys
from pathlib import Path

from quire.local_stack.processes import child_environment
from tests.support.stack.up_process import wait_gone


def test_demo_shows_one_trace_over_three_services_and_leaves_nothing(tmp_path: Path) -> None:
    """Status 0; a completion, a chat, a tree with the three services under one id; its processes are gone."""
    folder = tmp_path / "a folder with spaces"
    folder.mkdir()
    command = [sys.executable, "-m", "quire.demo"]
    environ = child_environment({**os.environ, "COLUMNS": "200"})
    result = subprocess.run(command, cwd=folder, env=environ, capture_output=True, text=True, timeout=120, check=False)
    assert result.returncode == 0, result.stderr
    assert len(re.findall(r"^trace [0-9a-f]{32} ", result.stdout, re.M)) == 1
    tree = result.stdout[result.stdout.index("trace ") :]
    for span in ("quire-gateway", "scheduler.queue", "scheduler.prefill", "scheduler.decode", "worker.sequence"):
        assert re.search(rf"{re.escape(span)} .* ms", tree), span
    assert "assistant: " in result.stdout
    pids = [int(pid) for pid in re.findall(r"pid=(\d+)", result.stdout)]
    assert len(pids) == 3
    assert wait_gone(pids, timeout_s=0.5) == []
