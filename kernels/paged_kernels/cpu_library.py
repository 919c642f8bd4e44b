"""The compiled CPU kernels as a shared library: prebuilt in the installation, or compiled on this machine.

A platform's wheel carries builds (cpu_builds.py); the best for this processor is used. Without one, the C++
compiler builds it once into a private cache keyed by source, flags, compiler and processor.
QUIRE_KERNEL_LIBRARY names another library to use; QUIRE_CPU_KERNELS=torch forbids compiled code. If there is
no library, callers use plain torch.
"""

import ctypes
import fcntl
import hashlib
import os
import platform
import shutil
import stat
import subprocess
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from paged_kernels.cpu_builds import FLAGS, PREBUILT, SOURCES, Build, runnable

ABI = 12
LIBRARY_VARIABLE = "QUIRE_KERNEL_LIBRARY"
CHOICE_VARIABLE = "QUIRE_CPU_KERNELS"
CACHE_VARIABLE = "QUIRE_CACHE_DIR"
_BUILD_TIMEOUT_S = 300
_NATIVE = (*FLAGS, "-shared", "-march=native")
_TO_DO = "install Quire's wheel for this platform, which carries the kernels, or a C++ compiler (apt install g++)"


class UnusableCache(Exception):
    """A folder of the cache cannot be used; the message says why and what to do."""


class NoCompiledKernels(Exception):
    """No compiled library is available; the message says why."""


@dataclass(frozen=True, slots=True)
class KernelLibrary:
    """Source of the compiled kernels.

    `origin`: for messages. `compiler`: builds the file if it does not exist; None = prebuilt.
    """

    path: Path
    origin: str
    compiler: str | None = None


def load_library(environ: Mapping[str, str], say: Callable[[str], None]) -> ctypes.CDLL:
    """Load the library, building it if needed (`say` then gets one line). Raises NoCompiledKernels if there is none."""
    found = find_library(environ)
    if found.compiler is not None:
        _compile_once(found.path, found.compiler, say)
    return _open(found.path)


def find_library(environ: Mapping[str, str]) -> KernelLibrary:
    """The library that `load_library` would use. Raises NoCompiledKernels, saying what to do, if there is none."""
    if environ.get(CHOICE_VARIABLE, "") == "torch":
        raise NoCompiledKernels(f"{CHOICE_VARIABLE}=torch forbids compiled kernels; unset it")
    if given := environ.get(LIBRARY_VARIABLE):
        return KernelLibrary(Path(given), f"{given} ({LIBRARY_VARIABLE})")
    return _prebuilt() or _compiled(environ)


def runs_here() -> list[Build]:
    """Wheel builds that this processor can run, best first."""
    return runnable(platform.machine(), set(_processor().split()))


def _prebuilt() -> KernelLibrary | None:
    found = ((build, PREBUILT / build.file_name) for build in runs_here())
    return next((KernelLibrary(path, f"prebuilt for {build.name}") for build, path in found if path.exists()), None)


def _compiled(environ: Mapping[str, str]) -> KernelLibrary:
    names = [environ["CXX"]] if environ.get("CXX") else ["g++", "c++"]
    found = (shutil.which(name, path=environ.get("PATH", "")) for name in names)
    compiler = next(filter(None, found), None)
    if compiler is None:
        wanted = " or ".join(names)
        raise NoCompiledKernels(
            f"no build is installed for this processor and no C++ compiler found ({wanted}); {_TO_DO}"
        )
    try:
        path = private_folder(environ, "kernels") / f"paged_kernels-{_key(compiler, _NATIVE)}.so"
    except UnusableCache as error:
        raise NoCompiledKernels(str(error)) from error
    return KernelLibrary(path, f"compiled on this machine by {compiler}", compiler)


def _open(path: Path) -> ctypes.CDLL:
    try:
        library = ctypes.CDLL(str(path))
        abi = library.quire_kernels_abi()
    except (OSError, AttributeError) as error:
        raise NoCompiledKernels(f"{path} cannot be loaded: {error}") from error
    if abi != ABI:
        raise NoCompiledKernels(f"{path} has interface version {abi}, this release needs {ABI}; rebuild it")
    return library


def _compile_once(path: Path, compiler: str, say: Callable[[str], None]) -> None:
    with (path.parent / "build.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not path.exists():
            say("compiling the CPU kernels (once per machine)")
            build(path, [compiler, *_NATIVE])


def build(output: Path, command: Sequence[str]) -> None:
    """Compile to `output`, which appears only once complete. Raises NoCompiledKernels with the compiler's message."""
    with tempfile.TemporaryDirectory(dir=output.parent) as folder:
        made = Path(folder) / output.name
        try:
            compiling = [*command, str(SOURCES / "library.cpp"), "-o", str(made)]
            subprocess.run(compiling, check=True, capture_output=True, text=True, timeout=_BUILD_TIMEOUT_S)
        except subprocess.CalledProcessError as error:
            raise NoCompiledKernels(f"{command[0]} failed: {error.stderr.strip()[-500:]}") from error
        except (OSError, subprocess.TimeoutExpired) as error:
            raise NoCompiledKernels(f"{command[0]} failed: {error}") from error
        made.replace(output)


def private_folder(environ: Mapping[str, str], name: str) -> Path:
    """The folder `name` of the private cache. Code and weights are loaded from it, so no other user may have write access.

    Raises UnusableCache.
    """
    base = environ.get(CACHE_VARIABLE) or os.path.join(environ.get("XDG_CACHE_HOME") or "~/.cache", "quire")
    to_do = f"set {CACHE_VARIABLE} to a private folder"
    try:
        folder = Path(base).expanduser() / name
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        state = folder.stat()
    except (OSError, RuntimeError) as error:
        raise UnusableCache(f"cannot create the cache folder: {error}; {to_do}") from error
    if state.st_uid != os.getuid() or state.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise UnusableCache(f"{folder} is owned or writable by another user; {to_do}")
    if not os.access(folder, os.W_OK):
        raise UnusableCache(f"{folder} is not writable; {to_do}")
    return folder


@cache
def _key(compiler: str, flags: tuple[str, ...]) -> str:
    version = subprocess.run([compiler, "--version"], capture_output=True, check=False, timeout=30).stdout
    sources = [file.read_bytes() for file in sorted(SOURCES.iterdir()) if file.suffix in {".cpp", ".h"}]
    parts = [*sources, " ".join(flags).encode(), compiler.encode(), version, _processor().encode()]
    return hashlib.sha256(b"\0".join(parts)).hexdigest()[:24]


def _processor() -> str:
    """What -march=native depends on: the machine and its processor's features."""
    words = [platform.machine()]
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or words[0]
    for key in ("model name", "flags", "Features"):
        words += [line for line in lines if line.startswith(key)][:1]
    return "\n".join(words)
