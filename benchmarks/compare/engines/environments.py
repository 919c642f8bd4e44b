"""The peers' own environments: their folders, installed packages and Python."""

import subprocess
from collections.abc import Sequence
from pathlib import Path

from benchmarks.compare.engines.processes import plain_environment

ROOT = Path(__file__).resolve().parents[3]


class PeerEnvironment:
    """The environment `name` in the folder of peers (`make peers`)."""

    def __init__(self, peers: Path, name: str) -> None:
        self.folder = peers / name
        self._name = name

    @property
    def python(self) -> Path:
        """Its interpreter."""
        return self.folder / "bin" / "python"

    def missing(self) -> str:
        """Why it cannot be used; empty if it can."""
        is_there = self.python.exists() and (self.folder / ".installed").exists()
        return "" if is_there else f"not installed: make peers PEERS={self._name}"

    def environ(self, **more: str) -> dict[str, str]:
        """Environment of its programs: of this process's packages, only this benchmark's child programs."""
        return {**plain_environment(), "PYTHONPATH": str(ROOT), "VIRTUAL_ENV": str(self.folder), **more}

    def file(self, pattern: str) -> Path | None:
        """The first file in it that matches."""
        return next(iter(sorted(self.folder.glob(pattern))), None)

    def call(self, module: str, arguments: Sequence[str]) -> str:
        """Run one of its modules to its end. Raises RuntimeError with the end of its output if it fails."""
        return self.run([str(self.python), "-m", module, *arguments])

    def run(self, command: Sequence[str]) -> str:
        """Run a program in it to its end. Raises RuntimeError with the end of its output if it fails."""
        done = subprocess.run(command, env=self.environ(), capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(f"{' '.join(command)} failed: {(done.stderr or done.stdout).strip()[-1_000:]}")
        return done.stdout
