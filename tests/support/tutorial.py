"""A lesson of docs/tutorial: its blocks in order, run by bash as a reader would."""

import os
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from tests.support.tree import ROOT

LESSONS = sorted((ROOT / "docs" / "tutorial").glob("[0-9]*.md"))
_BLOCK = re.compile(r"^```(sh|python|json|yaml|text)\n(.*?)^```$", re.M | re.S)
_LIMIT_S = 1_200.0


class Lesson:
    """The lesson whose number is given, run in `folder`. `addresses`: what stands in the page, and what it is here.

    Each block is taken once and in order; `left` has those that were not taken, (language, text).
    """

    def __init__(self, number: int, folder: Path, addresses: Mapping[str, str], environ: Mapping[str, str]) -> None:
        self.folder = folder
        self._addresses = addresses
        paths = {
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "PYTHONPATH": f"{ROOT}:{ROOT / 'kernels'}",
        }
        self._environ = {**os.environ, **paths, **environ}
        self.left = [(kind, text) for kind, text in _BLOCK.findall(LESSONS[number - 1].read_text(encoding="utf-8"))]
        if not (folder / "models").exists():
            (folder / "models").symlink_to(ROOT / "models")

    def take(self, kind: str, start: str = "") -> str:
        """The next block, which is of that kind and begins so. Printed examples before it are passed over."""
        while kind != "text" and self.left[0][0] == "text":
            self.left.pop(0)
        found, text = self.left.pop(0)
        assert found == kind and text.startswith(start), (found, text)
        for written, here in self._addresses.items():
            text = text.replace(written, here)
        return text.replace(" --open", "")

    def save(self, kind: str, name: str) -> None:
        """Save the next block as the file `name`."""
        (self.folder / name).write_text(self.take(kind), encoding="utf-8")

    def run(self, start: str, kind: str = "sh") -> str:
        """Run the next block to its end; its standard output. AssertionError where a command failed."""
        process = self.begin(start, kind)
        printed, errors = process.communicate(timeout=_LIMIT_S)
        assert process.returncode == 0, (start, printed, errors)
        return printed

    def begin(self, start: str, kind: str = "sh") -> subprocess.Popen[str]:
        """Start the next block: shell commands, or a program. The caller waits for it."""
        text = self.take(kind, start)
        command = ["bash", "-euo", "pipefail", "-c", text] if kind == "sh" else [sys.executable, "-c", text]
        return subprocess.Popen(
            command,
            cwd=self.folder,
            env=self._environ,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
