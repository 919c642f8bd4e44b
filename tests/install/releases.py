"""Releases of one commit from new clones, as two people would make them."""

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from deploy.source import ROOT

UMASKS = {"one": 0o022, "the/other": 0o077}
"""By the clone's folder."""


def made(clone: Path, umask: int, *options: str, environ: Mapping[str, str] | None = None) -> Path:
    """The folder of a release from a new clone, with kernels compiled there. `options`: of `python -m deploy.release`."""
    subprocess.run(["git", "clone", "--quiet", "--shared", str(ROOT), clone], check=True)
    command = [sys.executable, "-m", "deploy.release", *options]
    given = {**os.environ, **(environ or {}), "PYTHONPATH": "kernels"}
    subprocess.run(command, cwd=clone, env=given, check=True, timeout=5000, umask=umask)
    return clone / "dist" / "release"


def sums(release: Path) -> str:
    """SHA256SUMS, which the files have been checked against."""
    command = ["sha256sum", "--check", "--strict", "SHA256SUMS"]
    subprocess.run(command, cwd=release, check=True, capture_output=True)
    return (release / "SHA256SUMS").read_text()
