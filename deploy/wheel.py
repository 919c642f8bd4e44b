"""Builds wheels that contain the CPU kernels, one per machine type (default: this machine's).

    PYTHONPATH=kernels python -m deploy.wheel --to dist x86_64 aarch64     # needs the extra `release`

Setuptools makes the platform-independent wheel; the libraries are added to copies of it, tagged
py3-none-manylinux_2_28_MACHINE. Each wheel carries its bill of materials (deploy/sbom.py). Equal sources give equal wheels.
"""

import argparse
import base64
import csv
import hashlib
import io
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import zipfile
from datetime import datetime
from pathlib import Path

from deploy import kernels
from deploy.sbom import FILE_NAME, bill_of_materials
from deploy.source import EPOCH_VARIABLE, ROOT, source_time
from paged_kernels.cpu_builds import BUILDS, PREBUILT

PURE = "any"
"""In place of a machine: the wheel without libraries."""
MACHINES = tuple(sorted({build.machine for build in BUILDS}))
_PURE_TAG = "py3-none-any"


def make_wheel(built: Path, machine: str, folder: Path, made: datetime) -> Path:
    """Write setuptools' wheel `built` to `folder` with the libraries for `machine` and its SBOM; older ones are removed.

    Raises ValueError for a machine without builds.
    """
    tag = _PURE_TAG if machine == PURE else f"py3-none-manylinux_{'_'.join(map(str, kernels.GLIBC))}_{machine}"
    target = folder / built.name.replace(_PURE_TAG, tag)
    with zipfile.ZipFile(built) as source:
        files = {info.filename: source.read(info) for info in source.infolist() if not info.is_dir()}
    record = next(name for name in files if name.endswith(".dist-info/RECORD"))
    del files[record]
    if machine != PURE:
        _add_libraries(files, record.replace("RECORD", "WHEEL"), tag, machine)
    files[record.replace("RECORD", f"sboms/{FILE_NAME}")] = bill_of_materials(target.name, files, made)
    for older in folder.glob(f"quire-*[_-]{machine}.whl"):
        older.unlink()
    _write(target, files, record)
    return target


def _add_libraries(files: dict[str, bytes], about: str, tag: str, machine: str) -> None:
    told = files[about].decode().replace(f"Tag: {_PURE_TAG}", f"Tag: {tag}")
    files[about] = told.replace("Root-Is-Purelib: true", "Root-Is-Purelib: false").encode()
    for library in kernels.builds(ROOT / "build" / "kernels", machine):
        files[f"paged_kernels/{PREBUILT.name}/{library.name}"] = library.read_bytes()


def _write(target: Path, files: dict[str, bytes], record: str) -> None:
    """The package's files by name, then those of *.dist-info, as PEP 427 recommends, RECORD last."""
    about = record.partition("/")[0]
    lines = io.StringIO()
    rows = csv.writer(lines, lineterminator="\n")
    with zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED) as wheel:
        for name in sorted(files, key=lambda name: (name.startswith(about), name)):
            wheel.writestr(_entry(name), files[name])
            rows.writerow((name, f"sha256={_digest(files[name])}", len(files[name])))
        rows.writerow((record, "", ""))
        wheel.writestr(_entry(record), lines.getvalue())


def _entry(name: str) -> zipfile.ZipInfo:
    """A zip entry without time stamp, so that equal contents give equal wheels."""
    made = zipfile.ZipInfo(name)
    made.compress_type, made.external_attr = zipfile.ZIP_DEFLATED, 0o644 << 16
    return made


def _digest(content: bytes) -> str:
    return base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()


def run_setuptools(kind: str, source: Path, folder: Path) -> Path:
    """Build the `wheel` or `sdist` of the sources in `source`; it still differs in time stamps from one made elsewhere.

    With this environment's setuptools: its version is part of what it makes.
    """
    shutil.rmtree(source / "build" / "lib", ignore_errors=True)  # setuptools would pack files that no longer exist
    environ = {**os.environ, EPOCH_VARIABLE: str(int(source_time().timestamp()))}
    options = ("--no-isolation", f"--{kind}", "--outdir", str(folder))
    done = subprocess.run(
        [sys.executable, "-m", "build", *options, str(source)], env=environ, capture_output=True, text=True, check=False
    )
    if done.returncode:
        sys.stderr.write(done.stdout[-2000:] + done.stderr[-2000:])
        raise subprocess.CalledProcessError(done.returncode, done.args)
    [made] = folder.glob("*.tar.gz" if kind == "sdist" else "*.whl")
    return made


def main() -> None:
    """Build wheels for the machines on the command line and print their paths."""
    parser = argparse.ArgumentParser(description="Build wheels with the CPU kernels inside.")
    names = f"{', '.join(MACHINES)}, or {PURE} for the wheel without libraries; default: this machine"
    parser.add_argument("machines", nargs="*", metavar="MACHINE", help=names)
    parser.add_argument("--to", type=Path, default=ROOT / "dist", help="folder of the wheels; default: dist")
    given = parser.parse_args()
    given.to.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch:
        built = run_setuptools("wheel", ROOT, Path(scratch))
        for machine in given.machines or [platform.machine()]:
            made = make_wheel(built, machine, given.to, source_time())
            sys.stdout.write(f"{made}\n")


if __name__ == "__main__":
    main()
