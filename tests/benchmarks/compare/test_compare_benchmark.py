"""The comparison with peers as a command: what its options change, and a real run of Quire alone."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import typer

from benchmarks.compare import __main__ as command_line
from benchmarks.compare.workloads import fixed
from quire.local_stack.processes import child_environment
from quire_tools.bench.workloads import Length


def test_changes_from_the_command_line() -> None:
    """Lengths, numbers and the rate; and what is no change is refused."""
    found = command_line._lengths(
        ["W2", "W4", "W5"], 8, ["W2.prompt=lognormal:9:0.5:4:16", "W5.rate=2.5", "W4.output=7"]
    )
    assert list(found) == ["W2", "W4", "W5"]
    assert found["W2"].num_requests == 8 and found["W2"].prompt == Length(9, 0.5, 4, 16)
    assert found["W4"].num_requests == 1 and found["W4"].output == fixed(7) and found["W5"].rate == 2.5
    for wrong in ("W9.rate=1", "W1.colour=1", "W1.output=many"):
        with pytest.raises(typer.BadParameter):
            command_line._lengths(["W1"], None, [wrong])
    for names in (["W1", "W9"], ["all"]):
        with pytest.raises(typer.BadParameter):
            command_line._lengths(names, None, [])


@pytest.mark.long
def test_quire_alone(tmp_path: Path) -> None:
    """A real run on a small model: both doors and `LLM` give the tokens of each request alone; there are a result and a picture."""
    out, picture = tmp_path / "compare.json", tmp_path / "compare.png"
    sizes = ("W1.output=12", "W2.output=10", "W3.output=6", "W3.shared=64", "W4.output=12", "W5.output=8", "W5.rate=20")
    arguments = [
        "--model",
        "bench-15m:layers=2,vocab=2000",
        "--engines",
        "quire,quire-http,quire-offline",
        "--rounds",
        "1",
    ]
    arguments += ["--requests", "6", "--kv-gib", "1", "--cache", str(tmp_path / "cache"), "--out", str(out)]
    arguments += [part for size in sizes for part in ("--set", size)]
    command = [sys.executable, "-m", "benchmarks.compare", *arguments, "--plot", str(picture)]
    environ = child_environment(os.environ)
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=2_400, check=False)
    assert done.returncode == 0, done.stderr[-2_000:]
    result = json.loads(out.read_text(encoding="utf-8"))
    assert len(result["runs"]) == 3 * 6 and not any(run["failed"] for run in result["runs"])
    assert result["tokens"] == {"checked": 2 * 11, "different": []}
    assert min(result["engines"]["quire"]["starts_s"]) > 0.5 and result["engines"]["quire"]["peak_mb"] > 200
    assert result["ratios"]["W1"]["quire-offline"]["tokens_per_s"]["median"] > 0
    assert picture.stat().st_size > 10_000 and "quire-offline" in done.stdout and "C7" in done.stdout
