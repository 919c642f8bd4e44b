"""How the compiled kernels are found, built and refused."""

import logging
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from paged_kernels import cpu_library
from paged_kernels.cpu_builds import BUILDS
from paged_kernels.cpu_compiled import CompiledCpuBackend
from paged_kernels.cpu_library import NoCompiledKernels, build, find_library, load_library
from paged_kernels.cpu_tiles import TiledCpuBackend
from paged_kernels.registry import make_backend


def environ(tmp_path: Path, **more: str) -> dict[str, str]:
    kept = {name: os.environ[name] for name in ("PATH", "HOME") if name in os.environ}
    return {**kept, "QUIRE_CACHE_DIR": str(tmp_path / "cache"), **more}


def test_forced_torch_path_warns_once(tmp_path, caplog):
    """QUIRE_CPU_KERNELS=torch gives the torch path and one line that says so."""
    with caplog.at_level(logging.WARNING):
        backend = make_backend("cpu", environ(tmp_path, QUIRE_CPU_KERNELS="torch"), print)
    assert isinstance(backend, TiledCpuBackend)
    assert len(caplog.records) == 1
    assert "QUIRE_CPU_KERNELS=torch" in caplog.text


@pytest.mark.parametrize("compiler", [{}, {"CXX": "no-such-compiler"}])
def test_no_compiler_falls_back(tmp_path, caplog, compiler):
    """Without prebuilt kernels and a compiler the torch path is taken; one line says why, what it costs and what to do."""
    backend = make_backend("cpu", environ(tmp_path, PATH=str(tmp_path), **compiler), print)
    assert isinstance(backend, TiledCpuBackend)
    (told,) = (record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING)
    for part in (
        "several times slower",
        "no C++ compiler",
        *compiler.values(),
        "install Quire's wheel for this platform",
    ):
        assert part in told


# Compilers beside g++, whose output on these sources this machine has in its cache: it again, and, in long runs, made anew.
COPY = """import shutil, sys
shutil.copy({built!r}, sys.argv[sys.argv.index("-o") + 1])
"""
QUICK = """import os, sys
os.execvp("g++", ["g++", *sys.argv[1:], "-O0"])
"""


@pytest.mark.parametrize("compiler", [COPY, pytest.param(QUICK, marks=pytest.mark.long)], ids=["copy", "-O0"])
def test_built_once_and_kept_private(tmp_path, compiler):
    """The first use compiles, with one line of progress; the second finds it. Other users may not write there."""
    lines: list[str] = []
    built = load_library(os.environ, lambda _: None)._name
    fake = tmp_path / "quick-g++"
    fake.write_text(f"#!{sys.executable} -S\n{compiler.format(built=built)}")
    fake.chmod(0o755)
    settings = environ(tmp_path, CXX=str(fake))
    assert isinstance(make_backend("cpu", settings, lines.append), CompiledCpuBackend)
    assert isinstance(make_backend("cpu", settings, lines.append), CompiledCpuBackend)
    assert len(lines) == 1
    folder = tmp_path / "cache" / "kernels"
    assert folder.stat().st_mode & 0o777 == 0o700
    assert len(list(folder.glob("*.so"))) == 1


def test_cache_that_others_can_write_is_refused(tmp_path):
    """Code is loaded from the cache, so a folder open to others is not used."""
    folder = tmp_path / "cache" / "kernels"
    folder.mkdir(parents=True)
    folder.chmod(0o777)
    with pytest.raises(NoCompiledKernels, match="writable by another user"):
        load_library(environ(tmp_path), print)


def test_compiler_errors_are_shown(tmp_path):
    """A failed build says what the compiler said, and leaves nothing behind."""
    with pytest.raises(NoCompiledKernels, match="no-such-flag"):
        build(tmp_path / "out.so", ["g++", "-shared", "--no-such-flag"])
    assert list(tmp_path.iterdir()) == []


def test_prebuilt_library(tmp_path):
    """QUIRE_KERNEL_LIBRARY names a library built beforehand; one of another release is refused."""
    other = tmp_path / "old.cpp"
    other.write_text('extern "C" int quire_kernels_abi() { return 999; }')
    subprocess.run(["g++", "-shared", "-fPIC", str(other), "-o", str(tmp_path / "old.so")], check=True, timeout=60)
    with pytest.raises(NoCompiledKernels, match="interface version 999"):
        load_library(environ(tmp_path, QUIRE_KERNEL_LIBRARY=str(tmp_path / "old.so")), print)
    with pytest.raises(NoCompiledKernels, match="cannot be loaded"):
        load_library(environ(tmp_path, QUIRE_KERNEL_LIBRARY=str(tmp_path / "none.so")), print)


V3 = "avx2 fma f16c bmi1 bmi2 movbe abm"
V4 = f"{V3} avx512f avx512bw avx512cd avx512dq avx512vl"


@pytest.mark.parametrize(
    ("machine", "flags", "chosen"),
    [
        ("x86_64", f"{V4} avx512_bf16 avx512_vnni", ["avx512_bf16", "avx512", "avx2"]),
        ("x86_64", f"{V4} avx512_bf16", ["avx512", "avx2"]),
        ("x86_64", f"{V3} avx512f avx512_bf16", ["avx2"]),
        ("x86_64", "avx2", []),
        ("aarch64", "fp asimd", ["neon"]),
        ("riscv64", "", []),
    ],
)
def test_the_best_prebuilt_library_is_taken(tmp_path, monkeypatch, machine, flags, chosen):
    """Of those that the installation carries, the best that this processor runs; never one that it does not run."""
    monkeypatch.setattr(cpu_library, "PREBUILT", tmp_path)
    monkeypatch.setattr(cpu_library, "_processor", lambda: f"{machine}\nflags : {flags}")
    monkeypatch.setattr(cpu_library.platform, "machine", lambda: machine)
    for carried in BUILDS:
        (tmp_path / carried.file_name).touch()
    for name in chosen:
        found = find_library(environ(tmp_path))
        assert (found.path, found.origin) == (tmp_path / f"{machine}-{name}.so", f"prebuilt for {name}")
        found.path.unlink()
    with pytest.raises(NoCompiledKernels, match=r"no C\+\+ compiler"):
        find_library(environ(tmp_path, PATH=str(tmp_path)))


def test_named_and_forbidden_libraries_come_first(tmp_path, monkeypatch):
    """QUIRE_CPU_KERNELS=torch, then QUIRE_KERNEL_LIBRARY, then what the installation carries, then the compiler."""
    monkeypatch.setattr(cpu_library, "PREBUILT", tmp_path)
    named = {"QUIRE_KERNEL_LIBRARY": "/some/kernels.so"}
    with pytest.raises(NoCompiledKernels, match="QUIRE_CPU_KERNELS=torch"):
        find_library(environ(tmp_path, QUIRE_CPU_KERNELS="torch", **named))
    assert find_library(environ(tmp_path, **named)).path == Path("/some/kernels.so")
    assert find_library(environ(tmp_path)).compiler == shutil.which("g++")
    (tmp_path / cpu_library.runs_here()[0].file_name).touch()
    assert find_library(environ(tmp_path)).compiler is None
