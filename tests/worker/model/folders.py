"""Quantized checkpoints that several tests change, each in a copy of its own."""

import shutil
from pathlib import Path

from tests.support.checkpoints import make_checkpoint
from tests.support.quantized_files import Stored, stored_so

WIDE = {"hidden_size": 128, "intermediate_size": 256}
"""Matrices that hold groups of 128."""


class Folders:
    """Llamas with quantized weights, each packed once. `root`: where they are."""

    def __init__(self, root: Path) -> None:
        self._root = root

    def copy(self, name: str, stored: Stored, folder: Path) -> Path:
        """The one of that name, as a folder within `folder`."""
        made = self._root / name / "stored"
        if not made.exists():
            stored_so(make_checkpoint("llama", self._root / name / "source", **WIDE), made, stored)
        return Path(shutil.copytree(made, folder / "stored"))
