"""Builds wheels that contain the CPU kernels, one per machine type (default: this machine's).

    PYTHONPATH=kernels python -m deploy.wheel --to dist x86_64 aarch64     # needs pip and the package ziglang

Setuptools makes the platform-independent wheel; the libraries are added to copies of it, tagged
py3-none-manylinux_2_28_MACHINE.
"""

import argparse
import base64
import csv
import hashlib
import io
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Sequence
from pathlib import Path

from deploy import kernels
from paged_kernels.cpu_builds import BUILDS, PREBUILT

ROOT = Path(__file__).resolve().parent.parent
_PURE_TAG = "py3-none-any"


def make_wheel(pure: Path, machine: str, folder: Path) -> Path:
    """Copy the wheel `pure` to `folder`, adding the libraries for `machine`; removes older wheels for that machine."""
    tag = f"py3-none-manylinux_{'_'.join(map(str, kernels.GLIBC))}_{machine}"
    target = folder / pure.name.replace(_PURE_TAG, tag)
    with zipfile.ZipFile(pure) as source:
        files = {info.filename: source.read(info) for info in source.infolist() if not info.is_dir()}
    record = next(name for name in files if name.endswith(".dist-info/RECORD"))
    about = record.replace("RECORD", "WHEEL")
    told = files[about].decode().replace(f"Tag: {_PURE_TAG}", f"Tag: {tag}")
    files[about] = told.replace("Root-Is-Purelib: true", "Root-Is-Purelib: false").encode()
    for library in kernels.builds(ROOT / "build" / "kernels", machine):
        files[f"paged_kernels/{PREBUILT.name}/{library.name}"] = library.read_bytes()
    del files[record]
    for older in folder.glob(f"quire-*_{machine}.whl"):
        older.unlink()
    _write(target, files, record)
    return target


def _write(target: Path, files: dict[str, bytes], record: str) -> None:
    lines = io.StringIO()
    rows = csv.writer(lines, lineterminator="\n")
    with zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED) as wheel:
        for name, content in files.items():
            wheel.writestr(_entry(name), content)
            rows.writerow((name, f"sha256={_digest(content)}", len(content)))
        rows.writerow((record, "", ""))
        wheel.writestr(_entry(record), lines.getvalue())


def _entry(name: str) -> zipfile.ZipInfo:
    """A zip entry without time stamp, so that equal contents give equal wheels."""
    made = zipfile.ZipInfo(name)
    made.compress_type, made.external_attr = zipfile.ZIP_DEFLATED, 0o644 << 16
    return made


def _digest(content: bytes) -> str:
    return base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()


def pure_wheel(folder: Path, pip_flags: Sequence[str]) -> Path:
    """Build the platform-independent wheel without libraries in `folder`."""
    shutil.rmtree(ROOT / "build" / "lib", ignore_errors=True)  # setuptools would pack files that no longer exist
    pip = (sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", str(folder), *pip_flags)
    subprocess.run((*pip, str(ROOT)), check=True)
    [made] = folder.glob(f"*-{_PURE_TAG}.whl")
    return made


def main() -> None:
    """Build wheels for the machines on the command line and print their paths."""
    parser = argparse.ArgumentParser(description="Build wheels with the CPU kernels inside.")
    known = sorted({build.machine for build in BUILDS})
    parser.add_argument("machines", nargs="*", metavar="MACHINE", help=f"{' or '.join(known)}; default: this machine")
    parser.add_argument("--to", type=Path, default=ROOT / "dist", help="folder of the wheels; default: dist")
    parser.add_argument("--pip-flags", default="", help="more options for pip")
    given = parser.parse_args()
    given.to.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch:
        pure = pure_wheel(Path(scratch), shlex.split(given.pip_flags))
        for machine in given.machines or [platform.machine()]:
            made = make_wheel(pure, machine, given.to)
            sys.stdout.write(f"{made}\n")


if __name__ == "__main__":
    main()
