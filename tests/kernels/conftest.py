"""The compiled kernels as this machine builds them, and, in long runs, as wheels carry them."""

import ctypes
import importlib.util
import os
import platform
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from deploy import kernels
from paged_kernels.cpu_builds import BUILDS, Build
from paged_kernels.cpu_compiled import CompiledCpuBackend
from paged_kernels.cpu_library import load_library, runs_here
from tests.support.tree import ROOT

NATIVE = "native"


@pytest.fixture(scope="session")
def prebuilt() -> dict[Build, Path]:
    """Builds of wheels that this processor runs, best first."""
    if importlib.util.find_spec("ziglang") is None:
        pytest.skip("ziglang is not installed: make wheel")
    made = {path.name: path for path in kernels.builds(ROOT / "build" / "kernels", platform.machine())}
    return {build: made[build.file_name] for build in runs_here()}


@pytest.fixture(scope="session")
def libraries() -> dict[str, ctypes.CDLL]:
    """Libraries that were loaded so far, by build."""
    return {}


@pytest.fixture(
    scope="session",
    params=[NATIVE, *(pytest.param(build, marks=pytest.mark.long, id=build.file_name) for build in BUILDS)],
)
def library(request, libraries) -> ctypes.CDLL:
    """Built for this processor, and by the command that builds for others."""
    build = request.param
    if build == NATIVE:
        return libraries.setdefault(NATIVE, load_library(os.environ, lambda _: None))
    named = request.getfixturevalue("prebuilt").get(build)
    if named is None:
        pytest.skip(f"this processor does not run {build.file_name}")
    return libraries.setdefault(build.file_name, load_library({"QUIRE_KERNEL_LIBRARY": str(named)}, lambda _: None))


@pytest.fixture(scope="session")
def compiled(library) -> CompiledCpuBackend:
    """The compiled backend of each build."""
    return CompiledCpuBackend(library)


@pytest.fixture
def threads():
    """`with threads(n):` computes with n threads."""

    @contextmanager
    def computing(count: int) -> Iterator[None]:
        before = torch.get_num_threads()
        torch.set_num_threads(count)
        try:
            yield
        finally:
            torch.set_num_threads(before)

    return computing
