"""How the compiled kernels are found, built and refused."""

import logging
import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest

from paged_kernels import cpu_library
from paged_kernels.cpu_compiled import CompiledCpuBackend
from paged_kernels.cpu_library import ABI, NoCompiledKernels, build, load_library
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


def test_no_compiler_falls_back(tmp_path, caplog):
    """Without a compiler the torch path is taken, with the reason."""
    backend = make_backend("cpu", environ(tmp_path, PATH=str(tmp_path)), print)
    assert isinstance(backend, TiledCpuBackend)
    assert "no C++ compiler" in caplog.text


def test_built_once_and_kept_private(tmp_path):
    """The first use compiles, with one line of progress; the second finds it. Nobody else may write there."""
    lines: list[str] = []
    fake = tmp_path / "quick-g++"
    # A compiler that adds -O0: the product is the same, the test is quicker.
    fake.write_text('#!/bin/sh\nexec g++ "$@" -O0\n')
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
    with pytest.raises(NoCompiledKernels, match="written by, others"):
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
    with pytest.raises(NoCompiledKernels, match="interface 999"):
        load_library(environ(tmp_path, QUIRE_KERNEL_LIBRARY=str(tmp_path / "old.so")), print)
    with pytest.raises(NoCompiledKernels, match="cannot be loaded"):
        load_library(environ(tmp_path, QUIRE_KERNEL_LIBRARY=str(tmp_path / "none.so")), print)


@pytest.mark.long
def test_build_command(tmp_path):
    """`python -m paged_kernels.cpu_library OUTPUT` builds a library that other machines can use."""
    path = tmp_path / "kernels.so"
    root = Path(__file__).parents[2]
    subprocess.run(
        [sys.executable, "-m", "paged_kernels.cpu_library", str(path)],
        check=True,
        timeout=400,
        env={**os.environ, "PYTHONPATH": str(root / "kernels")},
    )
    assert load_library(environ(tmp_path, QUIRE_KERNEL_LIBRARY=str(path)), print).quire_kernels_abi() == ABI
    if platform.machine() == "x86_64":
        built = {file.name for file in tmp_path.glob("*.so")}
        assert built == {"kernels.so", "kernels.avx512.so", "kernels.avx512bf16.so"}


@pytest.mark.parametrize(
    ("flags", "chosen"),
    [
        ("avx2 fma", "kernels.so"),
        ("avx512f avx512bw avx512cd avx512dq avx512vl", "kernels.avx512.so"),
        ("avx512f avx512bw avx512cd avx512dq avx512vl avx512_bf16 avx512vbmi", "kernels.avx512bf16.so"),
        ("avx512f avx512bw avx512cd avx512dq avx512vl avx512_bf16", "kernels.avx512.so"),
        ("avx512f avx512_bf16", "kernels.so"),
    ],
)
def test_the_best_build_is_taken(tmp_path, monkeypatch, flags, chosen):
    """Of those beside each other, what this processor can run; one that is not there is passed over."""
    base = tmp_path / "kernels.so"
    for name in ("kernels.so", "kernels.avx512.so", "kernels.avx512bf16.so"):
        (tmp_path / name).touch()
    monkeypatch.setattr(cpu_library, "_processor", lambda: f"x86_64\nflags : {flags}")
    assert cpu_library._best(base).name == chosen
    (tmp_path / "kernels.avx512bf16.so").unlink()
    assert cpu_library._best(base).name == chosen.replace("avx512bf16", "avx512")
