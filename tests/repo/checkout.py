"""Another commit of this repository, unpacked into a temporary folder."""

import contextlib
import os
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

from tests.support.tree import ROOT


@contextlib.contextmanager
def checkout(commit: str | None) -> Iterator[Path]:
    """Yield the root of `commit`'s files, which are removed at the end; of this checkout for None."""
    if commit is None:
        yield ROOT
        return
    with tempfile.TemporaryDirectory(prefix="quire-commit-") as folder:
        root, environ = Path(folder) / "files", {**os.environ, "GIT_INDEX_FILE": f"{folder}/index"}
        for command in (("read-tree", commit), ("checkout-index", "--all", f"--prefix={root}/")):
            subprocess.run(["git", "-C", str(ROOT), *command], env=environ, capture_output=True, check=True, timeout=60)
        yield root
