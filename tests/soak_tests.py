"""The part of the soak that runs the tests marked `soak`, each of them many minutes long: first those not passed for longest."""

import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from datetime import UTC, datetime

from benchmarks import report
from tests.support.tree import ROOT

MARK = "soak"
_PYTEST = [sys.executable, "-m", "pytest", "-m", MARK]

Passed = dict[str, dict[str, object]]
"""By test: when it last passed, at which commit, in how many seconds."""


def collected() -> list[str]:
    """Names of all of them, as pytest knows them."""
    done = subprocess.run([*_PYTEST, "--collect-only", "tests"], cwd=ROOT, capture_output=True, text=True, check=False)
    names = [line for line in done.stdout.splitlines() if "::" in line]
    assert done.returncode == 0 and names, done.stdout + done.stderr
    return names


def longest_ago(passed: Passed, names: Iterable[str]) -> list[str]:
    """Those that never passed, then those that passed, by time."""
    return sorted(names, key=lambda name: str(passed.get(name, {}).get("when", "")))


def test_on(passed: Passed, names: Iterable[str]) -> Iterator[str]:
    """Run each; what was done, which counts by then. AssertionError, with what pytest said, for one that fails."""
    for name in names:
        passed.pop(name, None)
        start = time.monotonic()
        done = subprocess.run([*_PYTEST, name], cwd=ROOT, capture_output=True, text=True, check=False)
        assert done.returncode == 0, f"{name}\n{done.stdout[-8000:]}{done.stderr[-2000:]}"
        seconds = round(time.monotonic() - start, 1)
        when = datetime.now(UTC).isoformat(timespec="seconds")
        passed[name] = {"when": when, "commit": report.commit(), "seconds": seconds}
        yield f"{name} passed in {seconds:.0f} s"
