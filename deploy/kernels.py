"""Compiles the CPU kernels for other machines with Zig's Clang (the package ziglang), against glibc 2.28.

The libraries depend on the C library alone (kernels/paged_kernels/cpu/runtime.cpp), so that one serves every Python and torch.
"""

import hashlib
import importlib.metadata
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from paged_kernels.cpu_builds import BUILDS, FLAGS, SOURCES, Build

GLIBC = (2, 28)
"""The oldest C library that builds run with: that of manylinux_2_28."""
_OBJECTS = ("library", "runtime")
_QUIET = ("-Wno-psabi",)  # vectors wider than registers are passed within the library only
_TIMEOUT_S = 1200


def builds(folder: Path, machine: str) -> list[Path]:
    """Libraries for `machine`, below `folder`, compiled if sources, flags or compiler are new. ValueError: none for it."""
    wanted = [build for build in BUILDS if build.machine == machine]
    if not wanted:
        raise ValueError(f"no builds for {machine!r}: use one of {sorted({build.machine for build in BUILDS})}")
    target = folder_of_builds(folder)
    target.mkdir(parents=True, exist_ok=True)
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        return list(pool.map(lambda build: _made(build, target / build.file_name), wanted))


def folder_of_builds(folder: Path) -> Path:
    """The folder below `folder` of builds from these sources, flags and compiler."""
    sources = [file.read_bytes() for file in sorted(SOURCES.iterdir()) if file.suffix in {".cpp", ".h", ".map"}]
    targets = [(build.file_name, build.cpu) for build in BUILDS]  # without sets, whose order differs from run to run
    settings = repr((FLAGS, targets, GLIBC, importlib.metadata.version("ziglang"))).encode()
    return folder / hashlib.sha256(b"\0".join([*sources, settings, Path(__file__).read_bytes()])).hexdigest()[:16]


def _made(build: Build, output: Path) -> Path:
    if not output.exists():
        with tempfile.TemporaryDirectory(dir=output.parent) as scratch:
            _compile(build, Path(scratch), Path(scratch, output.name))
            Path(scratch, output.name).replace(output)
    return output


def _compile(build: Build, scratch: Path, output: Path) -> None:
    target = ("-target", f"{build.machine}-linux-gnu.{'.'.join(map(str, GLIBC))}")
    for name in _OBJECTS:
        source, made = SOURCES / f"{name}.cpp", scratch / f"{name}.o"
        _zig("c++", *target, f"-mcpu={build.cpu}", *FLAGS, *_QUIET, "-c", str(source), "-o", str(made))
    exported = f"-Wl,-s,-z,defs,--version-script={SOURCES / 'exports.map'}"
    _zig("cc", *target, "-shared", exported, *(str(scratch / f"{name}.o") for name in _OBJECTS), "-o", str(output))


def _zig(*arguments: str) -> None:
    command: Sequence[str] = (sys.executable, "-m", "ziglang", *arguments)
    subprocess.run(command, check=True, timeout=_TIMEOUT_S)
