"""`python -m deploy.release [--to FOLDER] [--no-images] [--allow-changes]`: what is published of the commit that is checked out.

Wheels for x86-64, aarch64 and any machine, the source distribution, images, release notes and checksums. Made twice from one
commit, in whatever folder, the files are the same bytes.
"""

import argparse
import os
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path

from deploy.release.images import IMAGES, make_image, missing_engine
from deploy.release.notes import NOTES, SUMS, changelog_section, checksums, megabytes, release_notes
from deploy.sdist import make_sdist
from deploy.source import EPOCH_VARIABLE, ROOT, NotReleasable, changes, commit, export, source_time
from deploy.wheel import MACHINES, PURE, run_setuptools

_SHOWN_CHANGES = 10


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(prog="python -m deploy.release", description=__doc__)
    parser.add_argument("--to", type=Path, default=ROOT / "dist" / "release", help="default: dist/release")
    parser.add_argument("--no-images", action="store_true", help="no container images, even where they can be built")
    parser.add_argument("--allow-changes", action="store_true", help="release the commit, without the changes")
    given = parser.parse_args()
    began_s = time.monotonic()
    try:
        _check_changes(allowed=given.allow_changes)
        with tempfile.TemporaryDirectory(prefix="quire-release-") as scratch:
            files = _make(export(ROOT, Path(scratch) / "quire"), given.to, with_images=not given.no_images)
    except NotReleasable as error:
        return _fail(f"{error}", status=2)
    except subprocess.CalledProcessError as error:
        return _fail(f"`{' '.join(map(str, error.cmd))[:300]}` ended with {error.returncode}", status=1)
    for file in files:
        _say(f"{megabytes(file):>8} MB  {file.name}")
    _say(f"{len(files)} files in {given.to}, {time.monotonic() - began_s:.0f} s")
    return 0


def _check_changes(*, allowed: bool) -> None:
    """NotReleasable unless the checkout is as committed: what is published can be built again from the commit it names."""
    commit()
    if (found := changes()) and not allowed:
        listed = "\n".join(f"  {line}" for line in found[:_SHOWN_CHANGES])
        raise NotReleasable(
            f"{len(found)} files differ from the commit or are not in it:\n{listed}\n"
            "commit them, or give --allow-changes to release the commit without them"
        )


def _make(source: Path, folder: Path, *, with_images: bool) -> list[Path]:
    folder.mkdir(parents=True, exist_ok=True)
    made = source_time()
    version = tomllib.loads((source / "pyproject.toml").read_text(encoding="utf-8"))["project"]["version"]
    packages = list(_packages(source, folder, made))
    images = list(_images(version, source, folder, made)) if with_images else []
    changelog = (source / "CHANGELOG.md").read_text(encoding="utf-8")
    notes, sums = folder / NOTES, folder / SUMS
    text = release_notes(version, commit(), changelog_section(changelog, version), [*packages, *images])
    notes.write_text(text, encoding="utf-8")
    sums.write_text(checksums([*packages, *images, notes]), encoding="utf-8")
    return [*packages, *images, notes, sums]


def _packages(source: Path, folder: Path, made: datetime) -> Iterator[Path]:
    """The source distribution, then the wheels as `make wheel` makes them, by the commit's own scripts and kernels."""
    with tempfile.TemporaryDirectory(prefix="quire-built-") as scratch:
        _say("source distribution ...")
        yield make_sdist(run_setuptools("sdist", source, Path(scratch)), folder, made)
    _say("wheels ...")
    _share_compiled_kernels(source)
    environ = {**os.environ, "PYTHONPATH": str(source / "kernels"), EPOCH_VARIABLE: str(int(made.timestamp()))}
    command = [sys.executable, "-m", "deploy.wheel", "--to", str(folder.resolve()), PURE, *MACHINES]
    subprocess.run(command, cwd=source, env=environ, stdout=subprocess.DEVNULL, check=True)
    yield from sorted(folder.glob("quire-*.whl"))


def _share_compiled_kernels(source: Path) -> None:
    """Libraries are kept by the hash of what they are compiled from, so the checkout's serve the commit where that is equal."""
    kept = ROOT / "build" / "kernels"
    kept.mkdir(parents=True, exist_ok=True)
    (source / "build").mkdir(exist_ok=True)
    (source / "build" / "kernels").symlink_to(kept)


def _images(version: str, source: Path, folder: Path, made: datetime) -> Iterator[Path]:
    if why := missing_engine():
        _say(f"images are left out: {why}")
        return
    for name in IMAGES:
        _say(f"image of the {name} ...")
        yield make_image(name, version, source, folder, made)


def _say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def _fail(text: str, status: int) -> int:
    sys.stderr.write(f"error: {text}\n")
    return status


if __name__ == "__main__":
    sys.exit(main())
