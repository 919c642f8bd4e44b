"""A wheel of this tree, and an environment of its own that it is installed into, as on a machine that never saw Quire."""

import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from tests.compose.commands import ROOT, Failure, run

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
        return {**kept, **home, "PIP_CONSTRAINT": str(CONSTRAINTS), "COLUMNS": "200"}

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


def make_wheel(folder: Path) -> Path:
    """The wheel of what version control sees, built from a copy, so that nothing old in a build folder gets into it."""
    source = folder / "source"
    names = run("git", "ls-files", "-co", "--exclude-standard", "-z").split("\0")
    for name in filter(None, names):
        target = source / name
        target.parent.mkdir(parents=True, exist_ok=True)
        if os.path.lexists(ROOT / name):
            shutil.copy2(ROOT / name, target, follow_symlinks=False)
    run(sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", folder, source)
    [wheel] = folder.glob("quire-*.whl")
    return wheel
