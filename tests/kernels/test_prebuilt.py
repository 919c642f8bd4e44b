"""The kernels that wheels carry. Skipped where ziglang, which compiles them, is not installed (`make wheel` installs it)."""

import base64
import csv
import hashlib
import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import torch

from deploy import wheel
from deploy.kernels import GLIBC
from deploy.source import ROOT, source_time
from paged_kernels.backend import AttentionRule, CacheShape
from paged_kernels.cpu_builds import BUILDS
from paged_kernels.cpu_compiled import CompiledCpuBackend
from paged_kernels.cpu_library import load_library
from paged_kernels.program import Attend, Gated, HeadNorm, Linear, Norm, RotateAndStore, Rows
from tests.kernels.programs import Bench, Cache, packed, random

START = """
import os, sys
lines = []
from paged_kernels.registry import make_backend
backend = make_backend("cpu", os.environ, lines.append)
runtimes = {line.split()[-1] for line in open("/proc/self/maps") if "omp" in line.split()[-1].rpartition("/")[2]}
print(type(backend).__name__, lines, len(runtimes), sys.modules["paged_kernels"].__path__[0])
"""


@pytest.fixture(scope="module")
def made_wheel(tmp_path_factory, prebuilt) -> Path:
    """A wheel for this machine."""
    folder = tmp_path_factory.mktemp("wheel")
    built = wheel.run_setuptools("wheel", ROOT, folder)
    return wheel.make_wheel(built, next(iter(prebuilt)).machine, folder, source_time())


def layer(backend: CompiledCpuBackend, dtype: torch.dtype, bits: int, cache_dtype: torch.dtype) -> torch.Tensor:
    """A layer with everything that layers have, of three sequences at once."""
    heads, kv_heads, dim, width, gated = 6, 2, 40, 240, 352
    weights = {
        name: packed(
            backend.decoder, random(*sizes, dtype=dtype, seed=seed) / 16, random(sizes[0], dtype=dtype, seed=9), bits
        )
        for seed, (name, sizes) in enumerate(
            {
                "heads": ((heads + 2 * kv_heads) * dim, width),
                "out": (width, heads * dim),
                "gate": (gated, width),
                "up": (gated, width),
                "down": (width, gated),
            }.items()
        )
    }
    norms = [random(width, dtype=dtype, seed=20), random(dim, dtype=dtype, seed=21)]
    angles = [random(64, dim, dtype=dtype, seed=22), random(64, dim, dtype=dtype, seed=23)]
    operators = [
        Norm(Rows.STREAM, Rows.NORMED, norms[0], 1e-6),
        Linear(Rows.NORMED, Rows.HEADS, weights["heads"]),
        RotateAndStore(0, *angles, HeadNorm(norms[1], norms[1], 1e-6, False)),
        Attend(0, AttentionRule(dim**-0.5, None, 30.0)),
        Linear(Rows.ATTENDED, Rows.STREAM, weights["out"], adds=True),
        Norm(Rows.STREAM, Rows.NORMED, norms[0], 1e-6, one_plus=True),
        Gated(Rows.NORMED, Rows.GATED, weights["gate"], weights["up"], "gelu_tanh"),
        Linear(Rows.GATED, Rows.STREAM, weights["down"], adds=True),
    ]
    cache = Cache(CacheShape(16, kv_heads, dim), 3, 40, cache_dtype)
    widths = {
        Rows.STREAM: width,
        Rows.NORMED: width,
        Rows.HEADS: (heads + 2 * kv_heads) * dim,
        Rows.ATTENDED: heads * dim,
        Rows.GATED: gated,
    }
    batch = cache.batch([(0, 0, 40), (1, 0, 7), (2, 0, 1)])
    return Bench(backend, widths, heads, dtype).run(operators, random(48, width, dtype=dtype), cache, batch)


@pytest.mark.parametrize(("bits", "rounds_cache"), [(0, False), (8, False), (4, False), (0, True)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_prebuilt_layers_agree(prebuilt, dtype, bits, rounds_cache):
    """Every build that runs here computes a layer as this machine's compiler does: the best in every bit, others to rounding."""
    given = (dtype, bits, torch.int8 if rounds_cache else dtype)
    expected = layer(CompiledCpuBackend(load_library(os.environ, lambda _: None)), *given)
    assert expected.isfinite().all()
    for number, path in enumerate(prebuilt.values()):
        found = layer(CompiledCpuBackend(load_library({"QUIRE_KERNEL_LIBRARY": str(path)}, print)), *given)
        if number == 0:
            assert torch.equal(found, expected), path.name
        # A number of a rounded row that lies on the border between two becomes either.
        tolerance = 1e-4 if dtype == torch.float32 else 2e-1 if bits or rounds_cache else 5e-2
        torch.testing.assert_close(
            found, expected, rtol=tolerance, atol=tolerance, msg=lambda m, p=path: f"{p.name}: {m}"
        )


def test_builds_need_the_c_library_alone(prebuilt):
    """No library but libc, no version of it that manylinux_2_28 lacks: neither a C++ library nor an OpenMP of their own."""
    for path in prebuilt.values():
        content = path.read_bytes()
        assert set(re.findall(rb"[\w+-]+\.so\.\d+", content)) == {b"libc.so.6"}, path.name
        versions = {tuple(map(int, found.split(b"."))) for found in re.findall(rb"GLIBC_([0-9.]+)\0", content)}
        assert versions and max(versions) <= GLIBC, (path.name, versions)
        assert not re.search(rb"GLIBCXX|CXXABI|__kmpc|GOMP_", content), path.name


@pytest.mark.parametrize("hash_seed", ["1", "2"])
def test_builds_are_kept(prebuilt, hash_seed):
    """Another process finds the builds of this one, and does not compile them again (sets have another order there)."""
    path = next(iter(prebuilt.values()))
    asking = f"from deploy import kernels; print(kernels.folder_of_builds(kernels.Path({str(path.parents[1])!r})))"
    found = subprocess.run(
        [sys.executable, "-c", asking],
        env={**os.environ, "PYTHONHASHSEED": hash_seed, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert found.stdout.strip() == str(path.parent)


def test_wheel_is_tagged_and_whole(made_wheel, prebuilt):
    """The builds of one machine, its tag, and a digest of every file."""
    machine = next(iter(prebuilt)).machine
    tag = f"py3-none-manylinux_2_28_{machine}"
    assert re.fullmatch(rf"quire-[\d.]+-{tag}\.whl", made_wheel.name)
    with zipfile.ZipFile(made_wheel) as files:
        names = set(files.namelist())
        about = next(name for name in names if name.endswith(".dist-info/WHEEL"))
        assert {"Root-Is-Purelib: false", f"Tag: {tag}"} <= set(files.read(about).decode().splitlines())
        libraries = {build.file_name for build in BUILDS if build.machine == machine}
        assert {name.rpartition("/")[2] for name in names if name.endswith(".so")} == libraries
        rows = csv.reader(files.read(about.replace("WHEEL", "RECORD")).decode().splitlines())
        digests = {name: digest for name, digest, _size in rows}
        assert digests.keys() == names
        for name in names - {about.replace("WHEEL", "RECORD")}:
            told = base64.urlsafe_b64encode(hashlib.sha256(files.read(name)).digest()).decode().rstrip("=")
            assert digests[name] == f"sha256={told}", name


def test_installed_wheel_needs_no_compiler(made_wheel, tmp_path):
    """A process that has the wheel and no compiler computes with compiled kernels at once, on torch's own OpenMP threads."""
    with zipfile.ZipFile(made_wheel) as files:
        files.extractall(tmp_path / "site")
    environ = {"PATH": str(tmp_path), "HOME": str(tmp_path), "PYTHONPATH": str(tmp_path / "site")}
    done = subprocess.run(
        [sys.executable, "-P", "-c", START],
        env=environ,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.stdout == f"CompiledCpuBackend [] 1 {tmp_path / 'site' / 'paged_kernels'}\n", done.stderr
