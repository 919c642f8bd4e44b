"""A wheel, and an environment of its own that it is installed into, as on a machine that never saw Quire."""

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from tests.support.commands import ROOT, Failure, run

CONSTRAINTS = ROOT / "constraints.txt"
_SHELL = "/bin/sh"


@dataclass(frozen=True, slots=True)
class Environment:
    """An interpreter with its packages, an empty folder to run in, and a home without anything cached."""

    wheel: Path
    folder: Path

    @property
    def bin(self) -> Path:
        """Its programs."""
        return self.folder / "venv" / "bin"

    @property
    def python(self) -> Path:
        """Its interpreter."""
        return self.bin / "python"

    @property
    def empty(self) -> Path:
        """Where commands run."""
        return self.folder / "empty"

    @property
    def environ(self) -> dict[str, str]:
        """No compiler on the path, no module path, no cache but pip's."""
        kept = {name: value for name, value in os.environ.items() if name.startswith(("PIP_", "SSL_", "LANG", "LC_"))}
        home = {"HOME": str(self.folder / "home"), "PATH": str(self.bin), "TMPDIR": str(self.folder / "tmp")}
        return {**kept, **home, "PIP_CONSTRAINT": CONSTRAINTS.as_uri(), "COLUMNS": "200"}

    def make(self) -> None:
        """The environment with the wheel alone: no extras."""
        for name in ("empty", "home", "tmp"):
            (self.folder / name).mkdir(parents=True)
        run(sys.executable, "-m", "venv", self.folder / "venv")
        self.shell(f"pip install '{self.wheel}'")

    def shell(self, command: str) -> None:
        """Runs an installation command as it stands, with pip's cache; Failure if it fails."""
        cache = run(sys.executable, "-m", "pip", "cache", "dir").strip()
        environ = {**self.environ, "PIP_CACHE_DIR": cache, "PIP_QUIET": "1", "PIP_RETRIES": "1"}
        done = subprocess.run(
            [_SHELL, "-c", command],
            cwd=self.empty,
            env=environ,
            capture_output=True,
            text=True,
            timeout=1800,
            check=False,
        )
        if done.returncode:
            raise Failure(f"`{command}` ended with {done.returncode}: {(done.stderr or done.stdout)[-600:]}")

    def quire(self, *arguments: str, timeout_s: float = 120) -> subprocess.CompletedProcess[str]:
        """`quire ARGUMENTS` in the empty folder, to its end."""
        command = [self.bin / "quire", *arguments]
        return subprocess.run(
            command, cwd=self.empty, env=self.environ, capture_output=True, text=True, timeout=timeout_s, check=False
        )
