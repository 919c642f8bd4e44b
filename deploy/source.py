"""What packages are built from: the time of the sources, and a commit's files without what a checkout has besides."""

import io
import os
import subprocess
import tarfile
import time
from datetime import UTC, datetime
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
EPOCH_VARIABLE = "SOURCE_DATE_EPOCH"


class NotReleasable(Exception):
    """The checkout is not in a state to release from; the text says what to do."""


def source_time(root: Path = ROOT) -> datetime:
    """SOURCE_DATE_EPOCH if it is set, else the commit's time, else now (reproducible-builds.org/specs/source-date-epoch)."""
    given = os.environ.get(EPOCH_VARIABLE) or _git(root, "log", "-1", "--format=%ct") or time.time()
    return datetime.fromtimestamp(int(given), UTC)


def commit(root: Path = ROOT) -> str:
    """Full name of the commit that is checked out. NotReleasable: `root` is no clone with git."""
    if not (found := _git(root, "rev-parse", "--verify", "HEAD")):
        raise NotReleasable(
            f"{root} is not a git repository with a commit, or git is not installed: clone the repository"
        )
    return found


def changes(root: Path = ROOT) -> list[str]:
    """Files that differ from the commit or are unknown to git, as `git status --porcelain` prints them; ignored ones left out."""
    return _git(root, "status", "--porcelain").splitlines()


def export(root: Path, folder: Path) -> Path:
    """The files of the commit, in `folder`, so that nothing that git ignores gets into a package."""
    packed = subprocess.run(
        ["git", "archive", "--format=tar", "HEAD"], cwd=root, capture_output=True, check=True
    ).stdout
    with tarfile.open(fileobj=io.BytesIO(packed)) as files:
        files.extractall(folder, filter="tar")
    return folder


def _git(root: Path, *words: str) -> str:
    """Its output; empty where git or the repository is missing, as in an image's build."""
    try:
        done = subprocess.run(["git", *words], cwd=root, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        return ""
    return done.stdout.rstrip() if done.returncode == 0 else ""
