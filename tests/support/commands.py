"""Running programs: one that failed says which and how; what a run of minutes is doing is told while it does it."""

import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
_TAIL_LINES = 40


class Failure(Exception):
    """What a person should read; nothing more is known than its text."""


def run(
    *words: str | Path,
    stdin: str | None = None,
    environ: Mapping[str, str] | None = None,
    cwd: Path = ROOT,
    timeout_s: float = 1800,
    check: bool = True,
) -> str:
    """Standard output of the command. `Failure` with the end of what it wrote if it failed, unless `check` is false."""
    done = subprocess.run(
        [str(word) for word in words],
        input=stdin,
        capture_output=True,
        text=True,
        errors="replace",
        env={**os.environ, **(environ or {})},
        cwd=cwd,
        timeout=timeout_s,
        check=False,
    )
    if check and done.returncode:
        tail = "\n".join((done.stdout + done.stderr).splitlines()[-_TAIL_LINES:])
        raise Failure(f"`{' '.join(map(str, words))}` ended with {done.returncode}:\n{tail}")
    return done.stdout


class Progress:
    """Names and durations of what was done, printed as it happens; `seconds` keeps them."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._began_s = time.monotonic()

    @contextmanager
    def step(self, name: str) -> Iterator[None]:
        """Times the block under `name`."""
        self.say(f"{name} ...")
        began_s = time.monotonic()
        yield
        self.seconds[name] = round(time.monotonic() - began_s, 2)
        self.say(f"{name}: {self.seconds[name]:.1f} s")

    def say(self, text: str) -> None:
        """One line, with the seconds since the start."""
        sys.stdout.write(f"[{time.monotonic() - self._began_s:6.1f}] {text}\n")
        sys.stdout.flush()
