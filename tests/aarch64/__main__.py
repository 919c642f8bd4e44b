"""Runs the kernel tests on an emulated aarch64 with the library that its wheel carries.

    python -m tests.aarch64 [pytest's arguments]     # default: all that need nothing but the kernels; minutes to half an hour

Needs qemu-user (Debian: apt install qemu-user-static), Debian's apt, a package index, ziglang and 1 GB below .venv/aarch64.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

from deploy import kernels
from tests.support.commands import ROOT, Failure, Progress, run
from tests.support.debian import RELEASE, Apt

_FOLDER = ROOT / ".venv" / "aarch64"
_QEMU = ("qemu-aarch64-static", "qemu-aarch64")
_PYTHON = "python3.11"
_PLATFORMS = ("manylinux_2_28_aarch64", "manylinux_2_17_aarch64", "manylinux2014_aarch64")
# torch 2.10 is the last of which the index has one for aarch64 without CUDA.
_PACKAGES = (
    *(
        "torch==2.10.0",
        "filelock",
        "typing-extensions",
        "sympy",
        "mpmath",
        "networkx",
        "jinja2",
        "markupsafe",
        "fsspec",
    ),
    *("numpy", "pytest", "pytest-timeout", "iniconfig", "packaging", "pluggy", "pygments"),
    *("hypothesis", "sortedcontainers", "attrs"),
)
_TESTS = tuple(f"tests/kernels/test_{name}.py" for name in ("attention", "decoder_program", "products", "quantized"))


def main(arguments: list[str]) -> int:
    """Pytest's exit status."""
    progress = Progress()
    try:
        root, site = _root(progress), _site(progress)
        with progress.step("compiling the kernels for aarch64"):
            [library] = kernels.builds(ROOT / "build" / "kernels", "aarch64")
        return _tests(_qemu(), root, site, library, arguments)
    except Failure as failure:
        progress.say(f"FAIL {failure}")
        return 1


def _qemu() -> str:
    found = next(filter(None, map(shutil.which, _QEMU)), None)
    if found is None:
        raise Failure(f"neither {' nor '.join(_QEMU)} is installed: apt install qemu-user-static")
    return found


def _root(progress: Progress) -> Path:
    """Debian's Python for aarch64 and the libraries that it needs, unpacked."""
    root = _FOLDER / "root"
    if not (root / ".complete").exists():
        with progress.step(f"fetching {_PYTHON} for aarch64"):
            apt = Apt(_FOLDER / "apt", RELEASE, architecture="arm64")
            for package in apt.fetch(_PYTHON, "libstdc++6", with_dependencies=True):
                root.mkdir(exist_ok=True)
                run("dpkg", "-x", package, root)
        (root / ".complete").touch()
    return root


def _site(progress: Progress) -> Path:
    site, stamp = _FOLDER / "site", _FOLDER / "site.txt"
    wanted = "\n".join(_PACKAGES)
    if not stamp.exists() or stamp.read_text() != wanted:
        shutil.rmtree(site, ignore_errors=True)
        platforms = (word for name in _PLATFORMS for word in ("--platform", name))
        options = (
            "--quiet",
            "--no-deps",
            "--only-binary=:all:",
            "--python-version",
            "3.11",
            *platforms,
            "--target",
            site,
        )
        with progress.step("fetching torch for aarch64"):
            run(sys.executable, "-m", "pip", "install", *options, *_PACKAGES)
        stamp.write_text(wanted)
    return site


def _tests(qemu: str, root: Path, site: Path, library: Path, arguments: list[str]) -> int:
    settings = {
        "PYTHONHOME": root / "usr",
        "PYTHONPATH": os.pathsep.join(map(str, (site, ROOT, ROOT / "kernels"))),
        "PYTHONDONTWRITEBYTECODE": 1,
        "QUIRE_KERNEL_LIBRARY": library,
    }
    given = (word for name, value in settings.items() for word in ("-E", f"{name}={value}"))
    pytest = (
        "-m",
        "pytest",
        "--confcutdir=tests/kernels",
        "-p",
        "no:cacheprovider",
        "-m",
        "not long and not soak",
        "-o",
        "timeout=0",
    )
    command = (qemu, "-L", root, *given, root / "usr" / "bin" / _PYTHON, *pytest, *(arguments or _TESTS))
    return subprocess.run(list(map(str, command)), cwd=ROOT, check=False).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
