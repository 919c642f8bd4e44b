"""The compiled CPU kernels as a shared library: found, or built once by the machine's C++ compiler and kept in a private cache.

The cache is keyed by source, flags, compiler and processor, so another machine or release never loads the wrong code. A library
that was built beforehand (`python -m paged_kernels.cpu_library OUTPUT`, for images without a compiler) is named by
QUIRE_KERNEL_LIBRARY; beside it lie builds for processors that can do more, of which the best that runs here is taken.
QUIRE_CPU_KERNELS=torch forbids compiled code; the caller then takes the torch path.
"""

import ctypes
import fcntl
import hashlib
import os
import platform
import shutil
import stat
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

FOLDER = Path(__file__).with_name("cpu")
SOURCE = FOLDER / "library.cpp"
ABI = 5
LIBRARY_VARIABLE = "QUIRE_KERNEL_LIBRARY"
CHOICE_VARIABLE = "QUIRE_CPU_KERNELS"
CACHE_VARIABLE = "QUIRE_CACHE_DIR"
_BUILD_TIMEOUT_S = 300
# -ffp-contract=fast fuses every a * b + c alike; without -ffast-math the compiler keeps the order of sums as written.
_FLAGS = ("-std=c++17", "-O3", "-fopenmp", "-ffp-contract=fast", "-fno-math-errno", "-fPIC", "-shared")


_AVX512 = frozenset({"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"})
# Best first: what comes into the file's name, flags, and what the processor must have (as /proc/cpuinfo names it).
_BEYOND_BASE = (
    ("avx512bf16", ("-march=x86-64-v4", "-mavx512bf16", "-mavx512vbmi"), _AVX512 | {"avx512_bf16", "avx512vbmi"}),
    ("avx512", ("-march=x86-64-v4",), _AVX512),
)


class NoCompiledKernels(Exception):
    """No compiled library can be had here; the message says why."""


def load_library(environ: Mapping[str, str], say: Callable[[str], None]) -> ctypes.CDLL:
    """The library, built if need be (`say` then gets one line). NoCompiledKernels where there is none."""
    if environ.get(CHOICE_VARIABLE, "") == "torch":
        raise NoCompiledKernels(f"{CHOICE_VARIABLE}=torch")
    given = environ.get(LIBRARY_VARIABLE)
    return _open(_best(Path(given)) if given else _cached(environ, say))


def _best(base: Path) -> Path:
    """The build beside `base` that suits this processor best, else `base`."""
    features = set(_processor().split())
    able = (_beside(base, name) for name, _flags, needed in _BEYOND_BASE if needed <= features)
    return next((path for path in able if path.exists()), base)


def _beside(base: Path, name: str) -> Path:
    return base.with_name(f"{base.stem}.{name}{base.suffix}")


def _open(path: Path) -> ctypes.CDLL:
    try:
        library = ctypes.CDLL(str(path))
        abi = library.quire_kernels_abi()
    except (OSError, AttributeError) as error:
        raise NoCompiledKernels(f"{path} cannot be loaded: {error}") from error
    if abi != ABI:
        raise NoCompiledKernels(f"{path} has interface {abi}, this release needs {ABI}; build it again")
    return library


def _cached(environ: Mapping[str, str], say: Callable[[str], None]) -> Path:
    search = environ.get("PATH", "")
    compiler = environ.get("CXX") or shutil.which("g++", path=search) or shutil.which("c++", path=search)
    if compiler is None:
        raise NoCompiledKernels("no C++ compiler (g++) is installed")
    flags = (*_FLAGS, "-march=native")
    folder = _private_folder(environ)
    path = folder / f"paged_kernels-{_key(compiler, flags)}.so"
    with (folder / "build.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not path.exists():
            say("compiling the CPU kernels (once for this machine)")
            build(path, [compiler, *flags])
    return path


def build(output: Path, command: Sequence[str]) -> None:
    """Compiles to `output`, which appears only when it is whole. NoCompiledKernels with the compiler's words."""
    with tempfile.TemporaryDirectory(dir=output.parent) as folder:
        made = Path(folder) / output.name
        try:
            subprocess.run(
                [*command, str(SOURCE), "-o", str(made)],
                check=True,
                capture_output=True,
                text=True,
                timeout=_BUILD_TIMEOUT_S,
            )
        except subprocess.CalledProcessError as error:
            raise NoCompiledKernels(f"{command[0]} failed: {error.stderr.strip()[-500:]}") from error
        except (OSError, subprocess.TimeoutExpired) as error:
            raise NoCompiledKernels(f"{command[0]} failed: {error}") from error
        made.replace(output)


def _private_folder(environ: Mapping[str, str]) -> Path:
    """Code is loaded from here, so nobody else may write to it."""
    base = environ.get(CACHE_VARIABLE) or os.path.join(environ.get("XDG_CACHE_HOME") or "~/.cache", "quire")
    folder = Path(base).expanduser() / "kernels"
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        state = folder.stat()
    except (OSError, RuntimeError) as error:
        raise NoCompiledKernels(f"no cache folder: {error}; set {CACHE_VARIABLE}") from error
    if state.st_uid != os.getuid() or state.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise NoCompiledKernels(f"{folder} belongs to, or can be written by, others; set {CACHE_VARIABLE}")
    if not os.access(folder, os.W_OK):
        raise NoCompiledKernels(f"{folder} cannot be written; set {CACHE_VARIABLE}")
    return folder


def _key(compiler: str, flags: Sequence[str]) -> str:
    version = subprocess.run([compiler, "--version"], capture_output=True, check=False, timeout=30).stdout
    sources = [file.read_bytes() for file in sorted(FOLDER.iterdir()) if file.suffix in {".cpp", ".h"}]
    parts = [*sources, " ".join(flags).encode(), compiler.encode(), version, _processor().encode()]
    return hashlib.sha256(b"\0".join(parts)).hexdigest()[:24]


def _processor() -> str:
    """What -march=native looks at: the machine and the features of its processor."""
    words = [platform.machine()]
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or words[0]
    for key in ("model name", "flags", "Features"):
        words += [line for line in lines if line.startswith(key)][:1]
    return "\n".join(words)


def main(arguments: Sequence[str]) -> int:
    """Builds a library for other machines: OUTPUT [-march=NAME]; on x86-64, unless told otherwise, x86-64-v3 and, beside it, what
    uses more of newer processors."""
    if not arguments:
        sys.stderr.write("usage: python -m paged_kernels.cpu_library OUTPUT [-march=NAME]\n")
        return 2
    output, march = Path(arguments[0]).resolve(), list(arguments[1:])
    builds = {output: march}
    if not march and platform.machine() == "x86_64":
        builds = {output: ["-march=x86-64-v3"]}
        builds |= {_beside(output, name): list(flags) for name, flags, _needed in _BEYOND_BASE}
    for path, flags in builds.items():
        build(path, [os.environ.get("CXX", "g++"), *_FLAGS, *flags])
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
