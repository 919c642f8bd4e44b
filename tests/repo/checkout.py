"""Another commit of this repository, unpacked into a temporary folder."""

import contextlib
import io
import subprocess
import tarfile
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
    archive = subprocess.run(
        ["git", "-C", str(ROOT), "archive", commit], capture_output=True, check=True, timeout=60
    ).stdout
    with tempfile.TemporaryDirectory(prefix="quire-commit-") as folder:
        with tarfile.open(fileobj=io.BytesIO(archive)) as files:
            files.extractall(folder, filter="data")
        yield Path(folder)
