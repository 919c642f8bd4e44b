"""The peers' own environments: where they are, what is installed there, how their Python is started."""

import subprocess
from collections.abc import Sequence
from pathlib import Path

from benchmarks.compare.engines.processes import plain_environment

ROOT = Path(__file__).resolve().parents[3]


class PeerEnvironment:
    """The environment `name` below the folder of peers (`make peers`)."""

    def __init__(self, peers: Path, name: str) -> None:
        self.folder = peers / name
        self._name = name

    @property
    def python(self) -> Path:
        """Its interpreter."""
        return self.folder / "bin" / "python"

    def missing(self) -> str:
        """Why it cannot be used; empty where it can."""
        is_there = self.python.exists() and (self.folder / ".installed").exists()
        return "" if is_there else f"not installed: make peers PEERS={self._name}"

    def environ(self, **more: str) -> dict[str, str]:
        """For its programs: nothing of this process' packages but this benchmark's children."""
        return {**plain_environment(), "PYTHONPATH": str(ROOT), "VIRTUAL_ENV": str(self.folder), **more}

    def file(self, pattern: str) -> Path | None:
        """The first file in it that matches."""
        return next(iter(sorted(self.folder.glob(pattern))), None)

    def call(self, module: str, arguments: Sequence[str]) -> str:
        """Runs one of its modules to its end. RuntimeError with its last words where it fails."""
        command = [str(self.python), "-m", module, *arguments]
        done = subprocess.run(command, env=self.environ(), capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(f"{module} failed: {(done.stderr or done.stdout).strip()[-1_000:]}")
        return done.stdout
