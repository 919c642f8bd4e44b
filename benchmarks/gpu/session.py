"""Runs stages one after the other under one time budget, each in a process of its own.

A stage is started only if its least time is left, and ended when the budget is. Results are written behind each stage.
"""

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.gpu import goals
from benchmarks.gpu.stages import Stage
from benchmarks.gpu.wheels import ROOT, with_wheels

_END_S = 5.0
"""Kept at the end, for processes to end and results to be written."""
_MARGIN_S = 8.0
"""Before a stage is ended, it measures nothing new."""
_TESTS = ("tests/kernels", "tests/worker/engine")
_REHEARSED_TESTS = ("tests/worker/engine/test_cache.py", "-k", "swapped_bytes")


@dataclass(slots=True)
class Session:
    """One run. `save` gets all results so far. `environ`: of the stages' processes; `rehearse`: on the stand-in for a GPU."""

    stages: Sequence[Stage]
    budget_s: float
    save: Callable[[Mapping[str, Any]], None]
    say: Callable[[str], None]
    environ: Mapping[str, str]
    rehearse: bool = False
    results: dict[str, Any] = field(
        default_factory=lambda: {"benchmark": "gpu", "stages": [], "figures": [], "skipped": []}
    )

    def run(self) -> dict[str, Any]:
        """All results: stages with their outcome, figures, and the table of goals."""
        deadline_s = time.monotonic() + self.budget_s - _END_S
        with tempfile.TemporaryDirectory(dir=_memory_folder()) as folder:
            environ = with_wheels(self.environ, Path(folder), self.say)
            for stage in self.stages:
                self._stage(stage, Path(folder), deadline_s - time.monotonic(), environ)
                self.results["goals"] = goals.table(self.results["figures"])
                self.save(self.results)
        return self.results

    def _stage(self, stage: Stage, folder: Path, left_s: float, environ: Mapping[str, str]) -> None:
        limit_s = min(stage.most_s, left_s)
        if left_s < stage.least_s:
            self._note(
                stage, f"skipped: {max(0.0, left_s):.0f} s are left, and it takes {stage.least_s:.0f} or more", 0.0
            )
            return
        self.say(f"{stage.name}: {stage.what}; at most {limit_s:.0f} s")
        begin, out = time.monotonic(), folder / f"{stage.name}.json"
        log = folder / f"{stage.name}.log"
        command = self._tests() if stage.name == "tests" else self._command(stage, folder, limit_s, out)
        status = _ended(command, log, limit_s, environ)
        outcome = "done" if status == 0 else "ended: out of time" if status is None else f"failed, status {status}"
        if stage.name == "tests":
            outcome = f"{outcome}; {_passed(log)}"
        self._note(stage, outcome, time.monotonic() - begin, "" if status == 0 else _last_lines(log))
        self._take(stage, out)

    def _command(self, stage: Stage, folder: Path, limit_s: float, out: Path) -> list[str]:
        seconds = max(1.0, limit_s - _MARGIN_S)
        options = ["--folder", str(folder), "--seconds", f"{seconds:.1f}", "--out", str(out)]
        return [
            *(sys.executable, "-m", "benchmarks.gpu.stages", stage.name, *options),
            *(["--rehearse"] if self.rehearse else []),
        ]

    def _tests(self) -> list[str]:
        chosen = _REHEARSED_TESTS if self.rehearse else _TESTS
        return [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-m", "not long", *chosen]

    def _note(self, stage: Stage, outcome: str, seconds: float, log: str = "") -> None:
        self.say(f"{stage.name}: {outcome}, {seconds:.0f} s")
        note = {"name": stage.name, "what": stage.what, "outcome": outcome, "seconds": round(seconds, 1)}
        self.results["stages"].append({**note, "log": log} if log else note)

    def _take(self, stage: Stage, out: Path) -> None:
        """Results of a stage, complete or not."""
        if not out.is_file():
            return
        found = json.loads(out.read_text(encoding="utf-8"))
        self.results.update({key: found[key] for key in ("device", "torch", "triton")})
        self.results["stages"][-1]["ceilings"] = found["ceilings"]
        self.results["figures"] += [{"stage": stage.name, **row} for row in found["figures"]]
        self.results["skipped"] += [f"{stage.name}: {line}" for line in found["skipped"]]


def _memory_folder() -> str | None:
    """Checkpoints are written to memory where there is much of it."""
    shared = Path("/dev/shm")
    if not shared.is_dir():
        return None
    free = os.statvfs(shared)
    return str(shared) if free.f_bavail * free.f_frsize > 40 * 2**30 else None


def _ended(command: Sequence[str], log: Path, limit_s: float, environ: Mapping[str, str]) -> int | None:
    """Exit status; None if it was ended. Processes that it started end with it."""
    with log.open("wb") as file:
        process = subprocess.Popen(
            command, cwd=ROOT, env=dict(environ), stdout=file, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            return process.wait(limit_s)
        except subprocess.TimeoutExpired:
            return None
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()


def _last_lines(log: Path) -> str:
    return "\n".join(log.read_text(encoding="utf-8", errors="replace").splitlines()[-25:])


def _passed(log: Path) -> str:
    """pytest's own count."""
    found = re.findall(
        r"\d+ (?:passed|failed|skipped|error\w*)[^\n]*", log.read_text(encoding="utf-8", errors="replace")
    )
    return found[-1] if found else "no count"
